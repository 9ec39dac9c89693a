"""Repair encodes anew only what is damaged, keeps what is intact, deletes nothing, and may be killed at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.build import CacheBuilder
from cache.errors import CacheError
from cache.formats import FORMATS
from cache.index import EntryIndex, update_index_file
from cache.index_file import INDEX_FILE
from cache.reader import FeatureCache
from cache.repair import DAMAGED, Repair, set_damaged_aside
from cache.verify import verify_cache
from pipeline.config import PipelineConfig

from .conftest import SILENT, assert_same_entries, builder_of, committed_keys, draw_images, write_rows
from .test_verify import KEYS, make_cache, verify


def cache_of(tmp_path: Path, make_config: Callable[..., PipelineConfig], format_name: str) -> PipelineConfig:
    """Six images in two shards or three."""
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 6))
    config = make_config({"train": str(rows)}, cache={"shard_size": 30_000})
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"format": format_name})})
    builder_of(config).run("train", SILENT)
    return config


@pytest.fixture(params=sorted(FORMATS))
def config(
    request: pytest.FixtureRequest, tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> PipelineConfig:
    """A cached split in each format."""
    return cache_of(tmp_path, make_config, request.param)


def shards_of(builder: CacheBuilder) -> list[Path]:
    """The shard with the most entries first."""
    indexes = sorted(
        (builder.folder / "shards").glob("*.json"), key=lambda f: -len(json.loads(f.read_text())["entries"])
    )
    return [index.parent / json.loads(index.read_text())["shard"] for index in indexes]


def entries_of(shard: Path) -> int:
    return len(json.loads(shard.with_suffix(".json").read_text())["entries"])


def repair(builder: CacheBuilder) -> Repair:
    return set_damaged_aside(builder.folder, FORMATS[builder.manifest.format], 30_000, SILENT)


def flip_in_entry(shard: Path) -> None:
    """One bit in the middle of one entry's numbers."""
    key = json.loads(shard.with_suffix(".json").read_text())["entries"][-1]["key"]
    shard_format = next(one for one in FORMATS.values() if one.suffix == shard.suffix)
    reader = shard_format.open(shard)
    numbers = reader.read(key).deepstack_features.numpy().tobytes()
    reader.close()
    whole = bytearray(shard.read_bytes())
    place = whole.index(numbers)
    whole[place + len(numbers) // 2] ^= 4
    shard.write_bytes(whole)


@pytest.mark.parametrize("damage", ["bit", "cut", "deleted", "index bit", "index deleted", "list", "manifest"])
def test_only_what_is_damaged_is_encoded_anew(
    config: PipelineConfig, tmp_path: Path, tower_calls: dict[str, int], damage: str
) -> None:
    builder = builder_of(config)
    sound = Path(shutil.copytree(builder.folder, tmp_path / "sound" / builder.folder.name))
    shard = shards_of(builder)[0]
    index, count = shard.with_suffix(".json"), entries_of(shard)
    assert count > 1
    before, moved = committed_keys(builder.folder), 2
    lost = {"bit": 1, "deleted": count, "index bit": 0, "index deleted": count}.get(damage, 0)
    if damage == "bit":
        flip_in_entry(shard)
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif damage == "deleted":
        shard.unlink()
        moved = 1
    elif damage == "index bit":
        index.write_bytes(index.read_bytes().replace(b'"num_bytes"', b'"num_bytds"', 1))
    elif damage == "index deleted":
        index.unlink()
        moved = 0
    else:
        file = builder.folder / ("manifest.json" if damage == "manifest" else "splits/train.json")
        file.write_bytes(file.read_bytes().replace(b'"', b"#", 1))
        moved = 1
    with pytest.raises(CacheError, match="pipeline cache"):
        verify(builder.folder).require_sound()
    done = repair(builder)
    assert len(done.moved) == moved
    assert {file.parent for file in done.moved} <= {builder.folder / DAMAGED}
    assert all(file.is_file() for file in done.moved)
    summary = builder_of(config).run("train", SILENT)
    if damage == "cut":  # what is behind the cut is lost, in HDF5 the whole file
        assert 1 <= summary.encoded_images <= count
        assert tower_calls["encode"] == summary.encoded_images
    else:
        assert summary.encoded_images == tower_calls["encode"] == lost
    assert committed_keys(builder.folder) == before
    assert_same_entries(builder.folder, sound)
    verify(builder.folder).require_sound()


def test_a_second_repair_finds_nothing(config: PipelineConfig) -> None:
    builder = builder_of(config)
    flip_in_entry(shards_of(builder)[0])
    assert repair(builder).lost_images == 1
    builder_of(config).run("train", SILENT)
    assert repair(builder) == Repair([], 0, 0)


def test_reading_a_damaged_entry_names_shard_and_command(config: PipelineConfig) -> None:
    builder = builder_of(config)
    shard = shards_of(builder)[0]
    flip_in_entry(shard)
    cache = FeatureCache(builder.folder)
    errors = []
    for key in cache.keys():  # noqa: SIM118  (not a mapping)
        try:
            cache.read(key)
        except CacheError as error:
            errors.append(error)
    assert [error.where for error in errors] == [str(shard)]
    assert "pipeline cache --repair --split" in str(errors[0].do)


@pytest.mark.parametrize("format_name", sorted(FORMATS))
def test_a_repair_that_is_cut_short_goes_on(tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each rename of the repair in turn; then again from the start."""
    rename = Path.rename

    class CutError(Exception):
        pass

    for step in range(4):
        folder = make_cache(tmp_path / f"{step:016x}", format_name)
        for index in sorted((folder / "shards").glob("*.json")):
            flip_in_entry(folder / "shards" / json.loads(index.read_text())["shard"])
        intact = verify(folder).intact_keys
        assert len(intact) == 3
        calls = iter(range(step))

        def cut(self: Path, target: Path, calls: Any = calls) -> Path:
            if next(calls, None) is None:
                raise CutError
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", cut)
        with pytest.raises(CutError):
            set_damaged_aside(folder, FORMATS[format_name], 1 << 30, SILENT)
        monkeypatch.setattr(Path, "rename", rename)
        assert intact <= set(FeatureCache(folder).keys())
        set_damaged_aside(folder, FORMATS[format_name], 1 << 30, SILENT)
        assert committed_keys(folder).count(KEYS[0]) <= 1
        assert verify(folder).all_damages() == []
        assert verify(folder).intact_keys == intact


@pytest.mark.parametrize("damage", ["shard", "index file", "index file lost"])
def test_the_index_file_covers_what_a_repair_leaves(tmp_path: Path, damage: str) -> None:
    folder = make_cache(tmp_path / "0123456789abcdef", "safetensors")
    whole = bytearray((folder / INDEX_FILE).read_bytes())
    if damage == "shard":
        flip_in_entry(next(file for file in (folder / "shards").iterdir() if file.suffix != ".json"))
    elif damage == "index file":
        whole[len(whole) // 2] ^= 1
        (folder / INDEX_FILE).write_bytes(whole)
    else:
        (folder / INDEX_FILE).unlink()
    set_damaged_aside(folder, FORMATS["safetensors"], 1 << 30, SILENT)
    said = EntryIndex.read(folder)
    assert said is not None
    assert list(said) == sorted(set(committed_keys(folder)))
    assert {stamp.index for stamp in said.stamps_of(list(said))} == {
        file.name for file in (folder / "shards").glob("*.json")
    }


def test_several_damaged_shards_are_mended_without_a_word_about_the_index(
    config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """It is brought up to date once, at the end: while a shard is damaged it cannot be."""
    builder = builder_of(config)
    for shard in shards_of(builder)[:2]:
        shard.write_bytes(shard.read_bytes()[:-9])
    with caplog.at_level("WARNING", "cache"):
        repair(builder)
    assert not caplog.records
    said = EntryIndex.read(builder.folder)
    assert said is not None
    assert list(said) == committed_keys(builder.folder)


def damage_at_random(folder: Path, dice: random.Random) -> None:
    """A flip, a cut or a loss of one file of the cache, most often of a shard."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.parent.name != DAMAGED)
    file = dice.choice(files)
    whole = bytearray(file.read_bytes())
    match dice.randrange(4):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(whole[: dice.randrange(len(whole))])
        case _:
            whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
            file.write_bytes(whole)


def spoil_and_mend(config: PipelineConfig, tmp_path: Path, rounds: int, seed: int) -> None:
    builder, dice = builder_of(config), random.Random(seed)
    sound = Path(shutil.copytree(builder.folder, tmp_path / "sound" / builder.folder.name))
    for _ in range(rounds):
        for _ in range(dice.randint(1, 3)):
            damage_at_random(builder.folder, dice)
        repair(builder)
        builder_of(config).run("train", SILENT)
        verify_cache(builder.folder, SILENT).require_sound()
        assert_same_entries(builder.folder, sound)


def test_some_random_damages_are_mended(config: PipelineConfig, tmp_path: Path) -> None:
    spoil_and_mend(config, tmp_path, 2, seed=3)


@pytest.mark.soak
def test_many_random_damages_are_mended(config: PipelineConfig, tmp_path: Path) -> None:
    spoil_and_mend(config, tmp_path, 40, seed=4)


def test_a_shard_without_an_index_is_moved_aside_once_it_is_old(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "0123456789abcdef", "safetensors")
    index = min((folder / "shards").glob("*.json"))
    shard = folder / "shards" / json.loads(index.read_text())["shard"]
    index.unlink()
    assert set_damaged_aside(folder, FORMATS["safetensors"], 1 << 30, SILENT).moved == []
    assert shard.exists(), "its index may be about to be written"
    hours_ago = time.time() - 7200
    os.utime(shard, (hours_ago, hours_ago))
    (moved,) = set_damaged_aside(folder, FORMATS["safetensors"], 1 << 30, SILENT).moved
    assert not shard.exists()
    assert moved.name.startswith(shard.name)
    update_index_file(folder)
