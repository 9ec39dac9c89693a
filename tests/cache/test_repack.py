"""A cache written anew in another format, shard size or storage dtype holds what the first one holds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from cache.errors import CacheError, ConfigError, StoppedError
from cache.find import find_cache
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.manifest import Manifest, load_manifest, save_manifest
from cache.progress import Silent
from cache.quantize import dequantize, quantize
from cache.reader import FeatureCache
from cache.repack import repack
from cache.split_files import save_split
from cache.split_images import SplitImage, SplitImages
from cache.writer import CacheWriter

from .conftest import assert_same, assert_same_entries, committed_keys, random_features, snapshot

KEYS = [f"{number:064x}" for number in range(7)]
FIELDS = {"dtype": "bfloat16", "storage_dtype": "bfloat16", "format_version": 1}
SILENT = Silent()


@pytest.fixture
def source(tmp_path: Path) -> FeatureCache:
    """Seven entries in three shards, with a split."""
    folder = tmp_path / "features" / Fingerprint(FIELDS).name
    save_manifest(
        folder,
        Manifest(
            format_version=1,
            format="safetensors",
            dtype="bfloat16",
            hidden_size=8,
            num_deepstack_levels=3,
            fingerprint=FIELDS,
            made_by={"torch": "2"},
        ),
    )
    with CacheWriter(folder, FORMATS["safetensors"], shard_size=1200) as writer:
        for number, key in enumerate(KEYS):
            writer.add(key, random_features(number, dtype="bfloat16"))
    images = [
        SplitImage(path=f"{n}.png", key=key, image_grid_thw=(1, 2, 12), size=1, mtime_ns=1)
        for n, key in enumerate(KEYS)
    ]
    refused = {"bad.png": "is empty"}
    save_split(folder, SplitImages(split="train", source="x", num_records=9, images=images, refused=refused))
    return FeatureCache(folder)


def run(source: FeatureCache, root: Path, **options: object) -> Path:
    given = {"format": None, "shard_size": None, "dtype": None, "progress": SILENT} | options
    return repack(source, root, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["webdataset", "hdf5"])
def test_another_format_and_back(source: FeatureCache, tmp_path: Path, to: str) -> None:
    before = snapshot(source.folder)
    root = source.folder.parent
    copy = run(source, root, format=to, shard_size=2000)
    assert copy == root / f"{source.folder.name}-{to}"
    assert {file.suffix for file in (copy / "shards").iterdir()} == {FORMATS[to].suffix, ".json"}
    assert_same_entries(copy, source.folder)
    assert FeatureCache(copy).split("train") == source.split("train")
    assert load_manifest(copy) == source.manifest.model_copy(update={"format": to})
    back = run(FeatureCache(copy), tmp_path / "back", format="safetensors")
    assert back.name == source.folder.name
    assert_same_entries(back, source.folder)
    assert snapshot(source.folder) == before


def test_the_source_is_found_while_its_copy_is_not_complete(source: FeatureCache) -> None:
    root = source.folder.parent
    steps = itertools.count()
    with pytest.raises(StoppedError):
        run(source, root, format="hdf5", should_stop=lambda: next(steps) >= 3)
    wanted = Fingerprint(FIELDS)
    assert find_cache(root, wanted, any_backend=True).folder == source.folder
    run(source, root, format="hdf5")
    assert find_cache(root, wanted, any_backend=True).folder == source.folder


def test_goes_on_where_it_was(source: FeatureCache, tmp_path: Path) -> None:
    steps = itertools.count()
    with pytest.raises(StoppedError):
        run(source, tmp_path / "copy", shard_size=300, should_stop=lambda: next(steps) >= 3)
    folder = tmp_path / "copy" / source.folder.name
    assert len(committed_keys(folder)) == 3
    with pytest.raises(CacheError, match="has not been cached yet"):
        FeatureCache(folder).split("train")
    kept = {name: state for name, state in snapshot(folder).items() if name.startswith("shards/")}
    assert run(source, tmp_path / "copy", shard_size=300) == folder
    assert kept.items() <= snapshot(folder).items()
    assert committed_keys(folder) == KEYS
    assert_same_entries(folder, source.folder)
    done = snapshot(folder)
    assert run(source, tmp_path / "copy") == folder
    assert snapshot(folder) == done


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3"])
def test_a_narrower_dtype_is_a_fingerprint_of_its_own(source: FeatureCache, dtype: str) -> None:
    folder = run(source, source.folder.parent, dtype=dtype)
    manifest = load_manifest(folder)
    assert manifest.fingerprint == FIELDS | {"storage_dtype": dtype}
    assert (manifest.dtype, manifest.storage_dtype) == ("bfloat16", dtype)
    assert folder.name == Fingerprint(manifest.fingerprint).name != source.folder.name
    copy = FeatureCache(folder)
    for key in KEYS:
        assert_same(copy.read(key), dequantize(quantize(source.read(key), dtype), torch.bfloat16))
    again = run(copy, source.folder.parent, format="hdf5")
    assert load_manifest(again).storage_dtype == dtype
    for key in KEYS:
        assert_same(FeatureCache(again).read(key), copy.read(key))
    for other in {"same", "int8", "float8_e4m3"} - {dtype}:
        with pytest.raises(ConfigError, match="what was lost does not come back"):
            run(copy, source.folder.parent, dtype=other)


def test_what_cannot_be_is_refused_before_anything_is_written(source: FeatureCache, tmp_path: Path) -> None:
    for options in ({}, {"shard_size": 10}, {"format": "safetensors"}, {"dtype": "same"}):
        with pytest.raises(ConfigError, match="would be the source itself"):
            run(source, source.folder.parent, **options)
    with pytest.raises(ConfigError, match="'tape' is not known"):
        run(source, tmp_path / "copy", format="tape")
    assert not (tmp_path / "copy").exists()


def test_a_damaged_entry_is_not_copied(source: FeatureCache, tmp_path: Path) -> None:
    shard = source.folder / "shards" / source.shard_of(KEYS[0]).shard
    content = bytearray(shard.read_bytes())
    content[-3] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CacheError) as caught:
        run(FeatureCache(source.folder, verify_checksums=False), tmp_path / "copy", format="webdataset")
    assert caught.value.where == str(shard)
    assert not list((tmp_path / "copy").glob("*/splits/*"))


def test_a_folder_that_holds_something_else_is_left_alone(source: FeatureCache, tmp_path: Path) -> None:
    folder = tmp_path / "copy" / source.folder.name
    save_manifest(folder, source.manifest.model_copy(update={"fingerprint": {"dtype": "float16"}}))
    before = json.loads((folder / "manifest.json").read_text())
    with pytest.raises(CacheError, match="holds features made otherwise"):
        run(source, tmp_path / "copy")
    assert json.loads((folder / "manifest.json").read_text()) == before
