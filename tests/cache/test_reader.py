"""Looking features up, in a cache that is whole and in one that is damaged."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from cache.errors import CacheError
from cache.files import LocalFiles
from cache.formats import SafetensorsFormat
from cache.manifest import load_shard_indexes, save_manifest
from cache.reader import FeatureCache
from cache.split_files import save_split
from cache.split_images import SplitImage, SplitImages
from cache.writer import CacheWriter

from ..manifests import manifest_of  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import assert_same, random_features

KEYS = [f"{number:064x}" for number in range(5)]
FEATURES = [random_features(number, tokens=number + 1) for number in range(5)]


def listed(number: int, path: str | None = None) -> SplitImage:
    grid = (1, 2, 2 * (number + 1))
    return SplitImage(path=path or f"{number}.png", key=KEYS[number], image_grid_thw=grid, size=1, mtime_ns=1)


def save_images(folder: Path, split: str, images: list[SplitImage]) -> None:
    save_split(folder, SplitImages(split=split, source="x", num_records=1, images=images, refused={}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five entries in a shard of three and one of two; the split `train` lists them all."""
    made = tmp_path / "features" / "0123456789abcdef"
    save_manifest(made, manifest_of("safetensors"))
    for numbers in ([0, 1, 2], [3, 4]):
        with CacheWriter(made, SafetensorsFormat(), shard_size=1 << 30, num_entries=len(numbers)) as writer:
            for number in numbers:
                writer.add(KEYS[number], FEATURES[number])
    save_images(made, "train", [listed(number) for number in range(5)])
    return made


def shard_of(folder: Path, key: str) -> Path:
    (name,) = [i.shard for i in load_shard_indexes(folder) if key in {entry.key for entry in i.entries}]
    return folder / "shards" / name


def test_by_key_and_by_path(folder: Path) -> None:
    cache = FeatureCache.open(folder.parent)
    assert len(cache) == 5
    assert cache.keys() == KEYS
    for number, features in enumerate(FEATURES):
        assert KEYS[number] in cache
        assert f"{number}.png" in cache
        assert_same(cache[KEYS[number]], features)
        assert_same(cache[f"{number}.png"], features)
        assert cache.grid(KEYS[number]) == tuple(features.image_grid_thw.tolist())
    for unknown in ("5.png", "", "f" * 64):
        assert unknown not in cache
        with pytest.raises(KeyError):
            cache[unknown]


def test_a_path_that_means_different_images_in_different_splits(folder: Path) -> None:
    save_images(folder, "val", [listed(0), listed(2, "1.png")])
    cache = FeatureCache(folder)
    assert_same(cache["0.png"], FEATURES[0])
    with pytest.raises(CacheError, match=r"1\.png belongs to 2 different images"):
        cache["1.png"]
    assert_same(cache[KEYS[1]], FEATURES[1])


def test_open_takes_the_folder_or_the_one_above(folder: Path, tmp_path: Path) -> None:
    assert FeatureCache.open(folder).keys() == FeatureCache.open(str(folder.parent)).keys()
    for nothing in (tmp_path / "missing", tmp_path, shard_of(folder, KEYS[0])):
        with pytest.raises(CacheError, match="there is no cache here"):
            FeatureCache.open(nothing)
    shutil.copytree(folder, folder.parent / "second")
    with pytest.raises(CacheError, match=r"2 caches here: .*0123456789abcdef.*second"):
        FeatureCache.open(folder.parent)
    assert len(FeatureCache.open(folder.parent / "second")) == 5


def test_a_split_that_is_missing_or_incomplete(folder: Path) -> None:
    assert [image.path for image in FeatureCache(folder).split("train").images] == [f"{n}.png" for n in range(5)]
    with pytest.raises(CacheError, match=r"'val' has not been cached yet(.|\n)*pipeline cache --split val"):
        FeatureCache(folder).split("val")
    shard = shard_of(folder, KEYS[3])
    shard.unlink()
    shard.with_suffix(".json").unlink()
    cache = FeatureCache(folder)
    with pytest.raises(CacheError, match=r"2 of 5 images are missing, e\.g\. 3\.png"):
        cache.split("train")
    assert "3.png" not in cache
    with pytest.raises(KeyError):
        cache["3.png"]
    assert_same(cache["0.png"], FEATURES[0])


def test_goes_to_worker_processes(folder: Path) -> None:
    cache = FeatureCache(folder)
    assert_same(cache.read(KEYS[0]), FEATURES[0])
    copy = pickle.loads(pickle.dumps(cache))
    assert_same(copy.read(KEYS[4]), FEATURES[4])

    class Entries(Dataset[tuple[torch.Tensor, ...]]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            features = cache.read(KEYS[index % 5])
            return features.image_embeds, features.deepstack_features

    for index, (embeds, deepstack) in enumerate(DataLoader(Entries(), batch_size=None, num_workers=2)):
        assert torch.equal(embeds, FEATURES[index % 5].image_embeds)
        assert torch.equal(deepstack, FEATURES[index % 5].deepstack_features)


def test_more_shards_than_are_held_open(folder: Path) -> None:
    count = LocalFiles.max_open_shards + 6
    with CacheWriter(folder, SafetensorsFormat(), shard_size=1) as writer:
        for number in range(count):
            writer.add(f"{100 + number:064x}", random_features(number))
    cache = FeatureCache(folder)
    order = [*range(count), *random.Random(0).choices(range(count), k=50)]
    for number in order:
        assert_same(cache.read(f"{100 + number:064x}"), random_features(number))


def test_leftovers_of_a_killed_writer_do_not_count(folder: Path) -> None:
    shard = shard_of(folder, KEYS[0])
    index = shard.with_suffix(".json")
    shutil.copy(shard, folder / "shards" / "shard-ffff.safetensors")  # without an index
    shutil.copy(shard, f"{shard}.tmp-00000000")
    shutil.copy(index, f"{index}.tmp-00000000")
    (folder / "splits" / "val.json.tmp-00000000").write_text("{")
    cache = FeatureCache(folder)
    assert cache.keys() == KEYS
    assert len(load_shard_indexes(folder)) == 2
    assert "0.png" in cache


def read_all(folder: Path, **options: Any) -> None:
    """Raises, or every entry is what was written."""
    cache = FeatureCache(folder, **options)
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(cache.read(key), features)


def test_every_flipped_bit_is_found_or_changes_nothing(folder: Path) -> None:
    shard = shard_of(folder, KEYS[0])
    whole = shard.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    dice = random.Random(0)
    bits = [*dice.sample(range(8 * header), 250), *dice.sample(range(8 * header, 8 * len(whole)), 60)]
    harmless, errors = [], []
    for bit in bits:
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(content)
        try:
            read_all(folder)
            harmless.append(bit // 8)
        except CacheError as error:
            errors.append(error)
    assert {error.where for error in errors} == {str(shard)}
    assert len(errors) > 250
    metadata = whole.index(b'"__metadata__"')
    assert all(metadata <= place < metadata + 40 for place in harmless), "a flip outside of the unused metadata"
    shard.write_bytes(whole)
    read_all(folder)


def spoil_shard(shard: Path, how: str) -> None:
    content = shard.read_bytes()
    if how == "deleted":
        shard.unlink()
    elif how == "folder":
        shard.unlink()
        shard.mkdir()
    else:
        shard.write_bytes(
            {
                "cut": content[:-1],
                "empty": b"",
                "longer": content + b"\0",
                "noise": random.Random(0).randbytes(len(content)),
            }[how]
        )


@pytest.mark.parametrize("how", ["deleted", "folder", "cut", "empty", "longer", "noise"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_shard_is_named_with_what_to_do(folder: Path, how: str, verify: bool) -> None:
    shard = shard_of(folder, KEYS[1])
    spoil_shard(shard, how)
    with pytest.raises(CacheError) as caught:
        read_all(folder, verify_checksums=verify)
    assert caught.value.where == str(shard)
    assert shard.with_suffix(".json").name in str(caught.value.do)
    if how == "folder":
        return
    shard.unlink(missing_ok=True)
    shard.with_suffix(".json").unlink()
    cache = FeatureCache(folder)  # the advice works: the rest can be read
    assert cache.keys() == KEYS[3:]
    assert_same(cache.read(KEYS[3]), FEATURES[3])


def rewrite(shard: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Another valid shard in the place of this one, with an index that states its size."""
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    index = json.loads(shard.with_suffix(".json").read_text())
    shard.with_suffix(".json").write_text(json.dumps(index | {"num_bytes": shard.stat().st_size}))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(f"{KEYS[0]}/deepstack_features"),
        lambda t: t.update({f"{KEYS[0]}/image_embeds": torch.zeros(1, 16)}),
        lambda t: t.update({name: v.half() for name, v in t.items() if v.is_floating_point()}),
        lambda t: t.update({f"{KEYS[0]}/deepstack_features": torch.zeros(2, 1, 8)}),
        lambda t: t.update({f"{KEYS[0]}/image_grid_thw": torch.tensor([1, 2, 4])}),
        lambda t: t.update({f"{KEYS[0]}/image_grid_thw": torch.zeros(3)}),
        lambda t: t.update({n.replace(KEYS[0], "x"): t.pop(n) for n in list(t) if n.startswith(KEYS[0])}),
    ],
    ids=["level missing", "width", "dtype", "levels", "grid", "grid dtype", "key"],
)
def test_a_shard_of_other_tensors_is_refused_even_without_checksums(folder: Path, change: Any) -> None:
    shard = shard_of(folder, KEYS[0])
    rewrite(shard, change)
    with pytest.raises(CacheError) as caught:
        FeatureCache(folder, verify_checksums=False).read(KEYS[0])
    assert caught.value.where == str(shard)


def test_exchanged_entries_are_found_by_the_checksum(folder: Path) -> None:
    shard = shard_of(folder, KEYS[3])
    first = f"{KEYS[3]}/image_embeds"
    rewrite(shard, lambda t: t.update({first: t[first].flip(0)}))
    with pytest.raises(CacheError, match="checksum"):
        FeatureCache(folder).read(KEYS[3])
    assert_same(FeatureCache(folder).read(KEYS[4]), FEATURES[4])


def test_a_format_of_another_program_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": "tape"}))
    with pytest.raises(CacheError, match="shard format 'tape' is not known"):
        FeatureCache(folder)


def test_a_shard_that_vanishes_after_the_cache_was_opened(folder: Path) -> None:
    cache = FeatureCache(folder)
    shard_of(folder, KEYS[0]).unlink()
    with pytest.raises(CacheError, match="cannot be read"):
        cache.read(KEYS[0])
    assert_same(cache.read(KEYS[3]), FEATURES[3])
