"""What a cache folder says about itself is checked field by field before it is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache import documents
from cache.errors import CacheError, DataError
from cache.manifest import (
    IndexEntry,
    Manifest,
    ShardIndex,
    load_manifest,
    load_shard_indexes,
    save_manifest,
    save_shard_index,
)
from cache.split_files import load_split, save_split
from cache.split_images import SplitImage, SplitImages

MANIFEST = Manifest(
    format_version=1,
    format="safetensors",
    dtype="bfloat16",
    hidden_size=4096,
    num_deepstack_levels=3,
    fingerprint={"dtype": "bfloat16", "processor.max_pixels": 100},
    made_by={"torch": "2"},
)
ENTRY = IndexEntry(key="a" * 64, image_grid_thw=(1, 2, 2), checksum="0" * 32)


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_round_trip(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    assert load_manifest(tmp_path) == MANIFEST
    assert MANIFEST.bytes_per_token() == 32 * 1024, "the 8B: 32 KiB a token"
    split = SplitImages(split="val", source="x", num_records=0, images=[], refused={"a.png": "is empty"})
    assert load_split(tmp_path, "val") is None
    save_split(tmp_path, split)
    assert load_split(tmp_path, "val") == split
    index = ShardIndex(shard="shard-1.safetensors", num_bytes=3, entries=[ENTRY])
    (tmp_path / "shards" / index.shard).write_bytes(b"abc")
    assert load_shard_indexes(tmp_path) == []
    save_shard_index(tmp_path, index)
    assert load_shard_indexes(tmp_path) == [index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: 'safetensors' in the cache, 'other' asked for"),
        ({"fingerprint": {"dtype": "float32"}}, "dtype: 'bfloat16' in the cache, 'float32' asked for"),
    ],
)
def test_a_manifest_is_never_replaced_by_another(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_manifest(tmp_path, MANIFEST)
    before = (tmp_path / "manifest.json").read_bytes()
    save_manifest(tmp_path, MANIFEST.model_copy(update={"made_by": {"torch": "3"}}))
    with pytest.raises(CacheError, match=message):
        save_manifest(tmp_path, MANIFEST.model_copy(update=change))
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("version", [0, 2])
def test_another_format_version_says_so_whatever_else_it_holds(tmp_path: Path, version: int) -> None:
    save_manifest(tmp_path, MANIFEST)
    edited(tmp_path / "manifest.json", format_version=version, a_field_of_the_future=1)
    with pytest.raises(CacheError, match=f"has format version {version}; this program reads version 1"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"dtype": "int4"}, "dtype"),
        ({"num_deepstack_levels": -1}, "num_deepstack_levels"),
        ({"format_version": None}, "format_version"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_damaged_manifest_names_the_field(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    save_manifest(tmp_path, MANIFEST)
    edited(tmp_path / "manifest.json", **change)
    with pytest.raises(CacheError, match=f"is damaged: {field}") as caught:
        load_manifest(tmp_path)
    assert caught.value.where == str(tmp_path / "manifest.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
@pytest.mark.parametrize("file", ["manifest.json", "shards/shard-1.json", "splits/val.json"])
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, file: str, content: bytes) -> None:
    save_manifest(tmp_path, MANIFEST)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CacheError, match="is damaged") as caught:
        load_manifest(tmp_path), load_shard_indexes(tmp_path), load_split(tmp_path, "val")
    assert caught.value.where == str(tmp_path / file)
    assert "--repair" in str(caught.value.do)


@pytest.mark.parametrize(
    "change",
    [
        {"shard": "../../elsewhere"},
        {"shard": "/etc/passwd"},
        {"shard": "a/b.safetensors"},
        {"shard": ".."},
        {"shard": "shard-1.safetensors\n"},
        {"num_bytes": -1},
        {"entries": [{**json.loads(ENTRY.model_dump_json()), "key": "../" * 20}]},
        {"entries": [{**json.loads(ENTRY.model_dump_json()), "image_grid_thw": [1, 2]}]},
        {"entries": [{"key": "a" * 64}]},
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_manifest(tmp_path, MANIFEST)
    (tmp_path / "shards" / "shard-1.safetensors").write_bytes(b"abc")
    save_shard_index(tmp_path, ShardIndex(shard="shard-1.safetensors", num_bytes=3, entries=[ENTRY]))
    edited(tmp_path / "shards" / "shard-1.json", **change)
    with pytest.raises(CacheError, match="is damaged"):
        load_shard_indexes(tmp_path)


@pytest.mark.parametrize(("content", "message"), [(None, "it is missing"), (b"abcd", "it has 4 bytes instead of 3")])
def test_a_shard_of_another_size_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    save_manifest(tmp_path, MANIFEST)
    save_shard_index(tmp_path, ShardIndex(shard="shard-1.safetensors", num_bytes=3, entries=[ENTRY]))
    shard = tmp_path / "shards" / "shard-1.safetensors"
    if content is not None:
        shard.write_bytes(content)
    with pytest.raises(CacheError, match=message) as caught:
        load_shard_indexes(tmp_path)
    assert caught.value.where == str(shard)
    assert "shard-1.json" in str(caught.value.do)


def test_folders_that_were_removed_are_made_again(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    (tmp_path / "splits").rmdir()
    save_manifest(tmp_path, MANIFEST)
    images = SplitImages(split="val", source="x", num_records=0, images=[], refused={})
    save_split(tmp_path, images)

    assert load_split(tmp_path, "val") == images


@pytest.mark.parametrize(
    "change",
    [{"key": "../" * 20}, {"key": "A" * 64}, {"image_grid_thw": [1, 2]}, {"size": "much"}, {"more": 1}, {"path": None}],
)
def test_a_list_of_images_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_manifest(tmp_path, MANIFEST)
    image = SplitImage(path="a.png", key="a" * 64, image_grid_thw=(1, 2, 2), size=3, mtime_ns=1)
    listed = SplitImages(split="val", source="x", num_records=1, images=[image], refused={})
    save_split(tmp_path, listed)
    assert load_split(tmp_path, "val") == listed
    file = tmp_path / "splits" / "val.json"
    images = json.loads(file.read_text())["images"]
    edited(file, images=[images[0] | change])
    with pytest.raises(CacheError, match=rf"(?s)is damaged: images\.0\.{next(iter(change))}.*--repair"):
        load_split(tmp_path, "val")


def test_nothing_is_written_that_would_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_manifest(tmp_path, MANIFEST)
    images = [SplitImage(f"{n}\u00e9.png", "a" * 64, (1, 2, 2), 1, 1) for n in range(20)]

    def listed(count: int) -> SplitImages:
        return SplitImages(split="val", source="x", num_records=0, images=images[:count], refused={})

    save_split(tmp_path, listed(19))
    size = (tmp_path / "splits" / "val.json").stat().st_size
    monkeypatch.setattr(documents, "MAX_JSON_BYTES", size)
    (tmp_path / "splits" / "val.json").unlink()
    save_split(tmp_path, listed(19))
    assert load_split(tmp_path, "val") == listed(19)
    with pytest.raises(DataError, match=rf"splits/val\.json: would have \d+ bytes.*{size}[\s\S]*data\.splits"):
        save_split(tmp_path, listed(20))
    assert load_split(tmp_path, "val") == listed(19), "the old one stands"
    assert [file.name for file in (tmp_path / "splits").iterdir()] == ["val.json"]
