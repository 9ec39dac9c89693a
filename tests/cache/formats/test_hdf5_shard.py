"""The HDF5 format: the common exam, that the stock library alone reads a shard, and what no shard may hold."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from cache.formats import Hdf5Format
from tests.cache.conftest import assert_same, random_features

from .conftest import KEYS, ShardFormatExam


class TestHdf5(ShardFormatExam):
    shard_format = Hdf5Format()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    def test_the_stock_library_reads_it(self, tmp_path: Path, dtype: str) -> None:
        features = [random_features(n, dtype=dtype) for n in range(len(KEYS))]
        with h5py.File(self.written(tmp_path, *features), "r") as file:
            assert list(file) == KEYS
            for key, expected in zip(KEYS, features, strict=True):
                assert set(file[key]) == {"image_embeds", "deepstack_features", "image_grid_thw"}
                for name, stored in file[key].items():
                    tensor = torch.from_numpy(stored[()])
                    if dtype == "bfloat16" and name != "image_grid_thw":
                        assert stored.attrs["dtype"] == "bfloat16"
                        tensor = tensor.view(torch.bfloat16)
                    assert torch.equal(tensor, getattr(expected, name))

    def test_large_datasets_start_on_a_page(self, tmp_path: Path) -> None:
        path = self.written(tmp_path, random_features(0, tokens=200), random_features(1, tokens=300))
        reader = self.shard_format.open(path)
        for key in KEYS[:2]:
            extents = reader.extents(key)
            assert extents.image_embeds.offset % 4096 == 0
            assert extents.deepstack_features.offset % 4096 == 0

    def test_hundreds_of_entries(self, tmp_path: Path) -> None:
        """The tree of the groups has more than one level then."""
        entries = [(f"{n * 7919:064x}", random_features(n % 5)) for n in range(600)]
        path = tmp_path / "shard.h5"
        self.shard_format.write(path, entries)
        reader = self.shard_format.open(path)
        assert reader.keys() == sorted(key for key, _ in entries)
        for key, features in entries[::37]:
            assert_same(reader.read(key), features)

    @pytest.mark.parametrize(
        "change",
        [
            lambda group: group.__setitem__("image_embeds", h5py.SoftLink("/" + KEYS[1] + "/image_embeds")),
            lambda group: group.__setitem__("image_embeds", h5py.ExternalLink("other.h5", "/x")),
            lambda group: group.create_dataset("image_embeds", (6, 8), "u2", external=[("other.bin", 0, 96)]),
            lambda group: group.create_dataset("image_embeds", (6, 8), "u2", chunks=(2, 8)),
            lambda group: group.create_dataset("image_embeds", (6, 8), "u2", compression="gzip"),
            lambda group: group.create_dataset("image_embeds", (6, 8), ">u2"),
            lambda group: group.create_dataset("image_embeds", (6, 8), "i2"),
            lambda group: group.create_dataset("image_embeds", (6, 8), h5py.string_dtype()),
            lambda group: group.create_dataset("image_embeds", data=np.zeros((6, 9), "u2")),
            lambda group: group.create_dataset("image_embeds", data=np.zeros((6, 8), "f4")),
            lambda group: group.create_group("image_embeds"),
            lambda group: group.create_dataset("more", data=np.zeros(3)),
            lambda group: group.create_virtual_dataset("image_embeds", h5py.VirtualLayout((6, 8), "u2")),
        ],
        ids=[
            "soft link",
            "external link",
            "external storage",
            "chunked",
            "filtered",
            "big-endian",
            "signed",
            "strings",
            "shape",
            "dtype",
            "group",
            "no embeds",
            "virtual",
        ],
    )
    def test_what_no_shard_holds_is_refused(self, tmp_path: Path, change: Callable[[Any], Any]) -> None:
        features = random_features(0, dtype="bfloat16")
        path = self.written(tmp_path, features, features)
        with h5py.File(path, "r+", libver="earliest") as file:
            del file[KEYS[0]]["image_embeds"]
            change(file[KEYS[0]])
        reader = self.shard_format.open(path)
        with pytest.raises(ValueError, match=r"link|shape|type|contiguous|message|dataset|size"):
            reader.read(KEYS[0])
        assert_same(reader.read(KEYS[1]), features)

    def test_files_of_other_versions_are_refused(self, tmp_path: Path) -> None:
        for libver in ("v108", "latest"):
            path = tmp_path / f"{libver}.h5"
            with h5py.File(path, "w", libver=libver) as file:
                file.create_group(KEYS[0])
            with pytest.raises(ValueError, match="is not an HDF5 file of version 0"):
                self.shard_format.open(path)

    def test_a_tree_in_a_circle_ends(self, tmp_path: Path) -> None:
        path = self.written(tmp_path, random_features(0))
        content = bytearray(path.read_bytes())
        tree = content.index(b"TREE")
        content[tree + 5] = 1  # says that its child is a node as well
        content[tree + 32 : tree + 40] = tree.to_bytes(8, "little")
        path.write_bytes(content)
        with pytest.raises(ValueError, match="circle"):
            self.shard_format.open(path)

    def test_a_full_disk_is_an_os_error_that_says_so(self, small_disk: Path) -> None:
        for tokens in (200_000, 20_000):
            entries = [(key, random_features(0, tokens=tokens)) for key in KEYS]
            with pytest.raises(OSError, match="No space left") as caught:
                self.shard_format.write(small_disk / "shard.h5", entries)
            assert caught.value.errno == 28
            (small_disk / "shard.h5").unlink()
        many = [(f"{n:064x}", random_features(0, tokens=1)) for n in range(2000)]
        with pytest.raises(OSError, match="No space left") as caught:
            self.shard_format.write(small_disk / "shard.h5", many)
        assert caught.value.errno == 28
        (small_disk / "shard.h5").unlink()
        self.shard_format.write(small_disk / "shard.h5", many[:3])
        assert_same(self.shard_format.open(small_disk / "shard.h5").read(many[0][0]), many[0][1])
        assert shutil.disk_usage(small_disk).free > 0
