"""The index of many entries: the same whether it comes from `entries.index`, from the JSON files, or from both."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cache.atomic import TEMPORARY_MARK
from cache.errors import CacheError
from cache.index import EntryIndex, index_file_damage, update_index_file
from cache.index_file import INDEX_FILE
from cache.journal import JOURNAL_SUFFIX
from cache.manifest import IndexEntry, ShardIndex, save_shard_index

SHARDS, ENTRIES = 12, 9


def entry(number: int) -> IndexEntry:
    dice = random.Random(number)
    grid = (1, dice.randrange(2, 100), dice.randrange(2, 100))
    return IndexEntry(key=dice.randbytes(32).hex(), image_grid_thw=grid, checksum=dice.randbytes(16).hex())


def add_shard(folder: Path, number: int, entries: list[IndexEntry]) -> Path:
    name = f"shard-{number:04d}.safetensors"
    (folder / "shards").mkdir(exist_ok=True, parents=True)
    (folder / "shards" / name).write_bytes(bytes(number))
    save_shard_index(folder, ShardIndex(shard=name, num_bytes=number, entries=entries))
    return folder / "shards" / f"shard-{number:04d}.json"


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, tuple[str, IndexEntry]]:
    """Key -> shard and entry of what `tmp_path` holds. The first key ends with zero bytes."""
    found = {}
    for shard in range(SHARDS):
        entries = [entry(100 * shard + n) for n in range(ENTRIES)]
        if shard == 0:
            entries[0] = entries[0].model_copy(update={"key": "ab" * 20 + "00" * 12})
        add_shard(tmp_path, shard, entries)
        found |= {e.key: (f"shard-{shard:04d}.safetensors", e) for e in entries}
    return found


def assert_holds(index: EntryIndex, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    assert index.keys() == sorted(expected)
    assert len(index) == len(expected)
    for key, (shard, listed) in expected.items():
        location = index[key]
        assert (location.shard, location.image_grid_thw, location.checksum) == (
            shard,
            listed.image_grid_thw,
            listed.checksum,
        )
        assert key in index
    assert {key: shard for shard, keys in index.by_shard() for key in keys} == {k: s for k, (s, _) in expected.items()}
    for wrong in ("", "f" * 64, "0" * 64, "x" * 64, next(iter(expected))[:-1], next(iter(expected)).upper()):
        assert wrong not in index
        with pytest.raises(KeyError):
            index[wrong]


def test_from_json_from_the_file_and_from_both(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    assert_holds(EntryIndex.open(tmp_path), expected)
    update_index_file(tmp_path)
    assert_holds(EntryIndex.open(tmp_path), expected)
    more = entry(5000)
    add_shard(tmp_path, 50, [more])
    expected[more.key] = ("shard-0050.safetensors", more)
    assert_holds(EntryIndex.open(tmp_path), expected)
    update_index_file(tmp_path)
    assert_holds(EntryIndex.open(tmp_path), expected)


def test_the_file_is_used(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], monkeypatch: object) -> None:
    update_index_file(tmp_path)
    for file in (tmp_path / "shards").glob("*.json"):  # cannot be read any more, and look as before
        status = file.stat()
        file.write_bytes(bytes(status.st_size))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_holds(EntryIndex.open(tmp_path), expected)


def test_a_shard_that_is_gone_does_not_count(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    update_index_file(tmp_path)
    for file in (tmp_path / "shards").glob("shard-0003.*"):
        file.unlink()
    left = {key: found for key, found in expected.items() if found[0] != "shard-0003.safetensors"}
    assert_holds(EntryIndex.open(tmp_path), left)


def test_a_json_index_that_changed_is_read_again(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    update_index_file(tmp_path)
    other = entry(7000)
    add_shard(tmp_path, 3, [other])
    left = {key: found for key, found in expected.items() if found[0] != "shard-0003.safetensors"}
    assert_holds(EntryIndex.open(tmp_path), left | {other.key: ("shard-0003.safetensors", other)})


@pytest.mark.parametrize("saved", [False, True])
def test_a_key_in_two_shards_stands_once(
    tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], saved: bool
) -> None:
    twice = expected[next(iter(expected))][1]
    file = add_shard(tmp_path, 60, [twice])
    if saved:
        update_index_file(tmp_path)
    assert_holds(EntryIndex.open(tmp_path), expected | {twice.key: ("shard-0060.safetensors", twice)})
    file.unlink()
    file.with_suffix(".safetensors").unlink()
    assert_holds(EntryIndex.open(tmp_path), expected)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(bytes(3))])
def test_a_missing_or_cut_shard_is_named(
    tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], saved: bool, spoil: Callable[[Path], object]
) -> None:
    if saved:
        update_index_file(tmp_path)
    shard = tmp_path / "shards" / "shard-0007.safetensors"
    spoil(shard)
    with pytest.raises(CacheError, match="the shard cannot be used") as caught:
        EntryIndex.open(tmp_path)
    assert caught.value.where == str(shard)


def test_an_empty_cache(tmp_path: Path) -> None:
    for _ in range(2):
        index = EntryIndex.open(tmp_path)
        assert index.keys() == []
        assert list(index.by_shard()) == []
        assert "0" * 64 not in index
        update_index_file(tmp_path)


def test_every_flipped_bit_is_found_and_the_json_files_are_read(
    tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], caplog: pytest.LogCaptureFixture
) -> None:
    update_index_file(tmp_path)
    file = tmp_path / INDEX_FILE
    whole = file.read_bytes()
    assert index_file_damage(tmp_path) is None
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        assert index_file_damage(tmp_path) is not None, f"bit {bit}"
    with caplog.at_level(logging.WARNING):
        assert_holds(EntryIndex.open(tmp_path), expected)
    assert "is damaged" in caplog.text
    update_index_file(tmp_path)
    assert index_file_damage(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"x" * 7, bytes(100), b"\xff" * 100])
def test_a_file_that_is_no_index(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], content: bytes) -> None:
    (tmp_path / INDEX_FILE).write_bytes(content)
    assert index_file_damage(tmp_path) is not None
    assert_holds(EntryIndex.open(tmp_path), expected)


@pytest.mark.parametrize("change", [{"checksum": "zz" * 16}, {"checksum": "00"}, {"image_grid_thw": [1, 2, 1 << 40]}])
def test_entries_that_cannot_be_are_named(tmp_path: Path, change: dict[str, object]) -> None:
    file = add_shard(tmp_path, 1, [entry(1)])
    listed = json.loads(file.read_text())
    listed["entries"][0] |= change
    del listed["digest"]
    file.write_text(json.dumps(listed))
    with pytest.raises(CacheError, match="is damaged") as caught:
        EntryIndex.open(tmp_path)
    assert caught.value.where == str(file)


def test_the_stock_library_reads_it(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    update_index_file(tmp_path)
    tensors = load_file(tmp_path / INDEX_FILE)
    assert [bytes(row.tolist()).hex() for row in tensors["keys"]] == sorted(expected)
    shards = [row[1] for row in json.loads(bytes(tensors["stamps"].tolist()))]
    assert [shards[n] for n in tensors["shard"].tolist()] == [expected[key][0] for key in sorted(expected)]
    assert tensors["grid"].dtype == torch.int32


def test_many_keys_at_once(tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]]) -> None:
    index = EntryIndex.open(tmp_path)
    dice = random.Random(5)
    strangers = [dice.randbytes(32).hex() for _ in range(20)] + ["0" * 64, "f" * 64, "ab" * 20 + "00" * 11 + "01"]
    asked = dice.sample([*expected, *strangers, *expected], 2 * len(expected) + len(strangers))
    assert index.missing(asked) == [place for place, key in enumerate(asked) if key in strangers]
    assert index.missing([]) == []
    some = dice.sample(sorted(expected), 7)
    assert {stamp.shard for stamp in index.stamps_of(some)} == {expected[key][0] for key in some}
    assert len(index.stamps_of(list(expected))) == SHARDS
    with pytest.raises(KeyError, match=strangers[3]):
        index.stamps_of([*some, strangers[3]])
    empty = EntryIndex.open(tmp_path / "nothing")
    assert empty.missing(strangers) == list(range(len(strangers)))
    assert empty.stamps_of([]) == []


@pytest.mark.parametrize("saved", [False, True])
def test_files_that_vanish_while_they_are_listed_hide_no_others(
    tmp_path: Path, expected: dict[str, tuple[str, IndexEntry]], saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer beside renames its temporary files and removes its journals; a repair moves shards aside."""
    if saved:
        update_index_file(tmp_path)
    more = entry(5000)
    add_shard(tmp_path, 50, [more])
    mark = f"shard-0051.safetensors{TEMPORARY_MARK}0"
    going = {mark, f"{mark}{JOURNAL_SUFFIX}", f"shard-0051.json{TEMPORARY_MARK}0", "shard-0003.json"}
    going |= {"shard-0003.safetensors"}
    for name in going:
        (tmp_path / "shards" / name).touch()
    scandir = os.scandir

    def vanishing(folder: Path) -> Any:
        with scandir(folder) as listing:
            entries = sorted(listing, key=lambda found: found.name not in going)
        for name in going:
            (Path(folder) / name).unlink(missing_ok=True)
        return nullcontext(entries)

    left = {key: found for key, found in expected.items() if found[0] != "shard-0003.safetensors"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", vanishing)
        index = EntryIndex.open(tmp_path)
    assert_holds(index, left | {more.key: ("shard-0050.safetensors", more)})
