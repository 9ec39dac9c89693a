"""The WebDataset format: the common exam, and that the stock libraries alone read a shard."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from safetensors.torch import load

from cache.formats import WebDatasetFormat
from tests.cache.conftest import random_features

from .conftest import KEYS, ShardFormatExam


class TestWebDataset(ShardFormatExam):
    shard_format = WebDatasetFormat()

    # The library leaves the file to the garbage collector to close.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_the_stock_libraries_read_it(self, tmp_path: Path) -> None:
        features = [random_features(n, dtype="bfloat16") for n in range(3)]
        path = self.written(tmp_path, *features)
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
        assert [sample["__key__"] for sample in samples] == KEYS[:3]
        for sample, expected in zip(samples, features, strict=True):
            tensors = load(sample["safetensors"])
            assert set(tensors) == {"image_embeds", "deepstack_features", "image_grid_thw"}
            for name, tensor in tensors.items():
                assert torch.equal(tensor, getattr(expected, name))

    @pytest.mark.parametrize(
        "change",
        [
            {"name": "../" * 21 + "x.safetensors"},
            {"name": f"{KEYS[0]}.pyd"},
            {"name": f"/{KEYS[0]}.safetensors"},
            {"name": f"{KEYS[0].upper()}.safetensors"},
            {"name": f"{KEYS[1]}.safetensors", "twice": True},
            {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
            {"type": tarfile.LNKTYPE, "linkname": f"{KEYS[1]}.safetensors"},
            {"type": tarfile.DIRTYPE},
            {"type": tarfile.FIFOTYPE},
            {"type": tarfile.GNUTYPE_SPARSE},
            {"pax_headers": {"path": "../x"}},
            {"mtime": 1},
            {"uname": "root"},
        ],
        ids=str,
    )
    def test_members_that_no_shard_has_are_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        content = b"x" * 600
        path = tmp_path / "shard.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            for _ in range(1 + change.pop("twice", False)):
                member = tarfile.TarInfo(f"{KEYS[0]}.safetensors")
                member.size = len(content)
                for name, value in change.items():
                    setattr(member, name, value)
                tar.addfile(member, io.BytesIO(content))
        with pytest.raises(ValueError, match="not one of a shard"):
            self.shard_format.open(path)

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda tar: tar.__setitem__(slice(124, 136), b"77777777777\0"),  # 8 GiB
            lambda tar: tar.__setitem__(slice(124, 136), b"\x80" + b"\xff" * 11),  # a size in base 256
            lambda tar: tar.__setitem__(512, 0xFF),  # the size of the member's own header
            lambda tar: tar.__setitem__(519, 0xFF),
            lambda tar: tar.__setitem__(-1, 1),
            lambda tar: tar.extend(bytes(10240)),
        ],
    )
    def test_sizes_are_checked_before_memory_is_taken(self, tmp_path: Path, spoil: Callable[[bytearray], Any]) -> None:
        path = self.written(tmp_path, random_features(0))
        content = bytearray(path.read_bytes())
        spoil(content)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r".+"):
            self.shard_format.open(path).read(KEYS[0])
