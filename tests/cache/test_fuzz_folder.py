"""Mutated manifests, indexes, lists and journals: an error of ours, the right data, or `verify` names the file."""

from __future__ import annotations

import logging
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cache.atomic import TEMPORARY_MARK
from cache.errors import CacheError
from cache.formats import FORMATS
from cache.formats.base import checksum
from cache.journal import JOURNAL_SUFFIX
from cache.manifest import load_manifest
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.salvage import take_up
from cache.split_images import SplitImage, SplitImages
from cache.verify import verify_cache
from cache.writer import CacheWriter

from .conftest import assert_same
from .formats.test_fuzz import mutated, small_allocations
from .test_remote import FEATURES, KEYS, make_cache

SILENT = Silent()
FILES = ["manifest.json", "entries.index", "splits/train.json", "shards/*.json"]
MAX_MEMORY = 1 << 22  # the whole cache has some 200 kB


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps every warning of a test, and they would count as memory of the code under test."""
    monkeypatch.setattr(logging.getLogger("cache.index"), "disabled", True)


def outcome(folder: Path, listed: SplitImages) -> str:
    """What a reader makes of a folder in which a file was changed.

    Args:
        listed: what the list said before.
    """
    try:
        cache = FeatureCache(folder)
        split = cache.split("train")
        for key, features in zip(KEYS, FEATURES, strict=True):
            assert_same(cache.read(key), features)
    except CacheError as error:
        return "error" if error.do else "an error that says nothing to do"
    return "right data" if (split, cache.keys()) == (listed, KEYS) else "other data"


def named_by_verify(folder: Path, file: Path) -> bool:
    try:
        found = verify_cache(folder, SILENT)
        found.require_sound()
    except CacheError as error:
        return file.name in str(error)
    return False


def run(folder: Path, pattern: str, seed: int, count: int) -> Counter[str]:
    (file, *_) = sorted(folder.glob(pattern))
    whole, dice, listed = file.read_bytes(), random.Random(seed), FeatureCache(folder).split("train")
    outcomes: Counter[str] = Counter()
    with small_allocations(MAX_MEMORY):
        for number in range(count):
            file.write_bytes(mutated(whole, dice))
            try:
                said = outcome(folder, listed)
                if said == "other data":  # a file without a digest, as one that a person has edited
                    assert named_by_verify(folder, file)
                assert said != "an error that says nothing to do"
            except BaseException as error:
                raise AssertionError(f"seed {seed}, input {number}") from error
            outcomes[said] += 1
    file.write_bytes(whole)
    return outcomes


@pytest.mark.parametrize("pattern", FILES)
def test_a_sample_of_the_folders_files(tmp_path: Path, pattern: str) -> None:
    outcomes = run(make_cache(tmp_path), pattern, seed=0, count=40)
    # A damaged entries.index is not used: what the shards' own indexes say is.
    assert outcomes["right data" if pattern == "entries.index" else "error"] > 30, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("pattern", FILES)
def test_many_of_the_folders_files(tmp_path: Path, pattern: str, seed: int) -> None:
    """12 times 1000 inputs."""
    assert run(make_cache(tmp_path), pattern, seed=seed, count=1000).total() == 1000


def unfinished(tmp_path: Path, name: str) -> tuple[Path, list[Path]]:
    """A cache without entries in which a killed writer has left a shard with its journal; and these files."""
    folder = make_cache(tmp_path, name)
    for file in (folder / "shards").iterdir():
        file.unlink()
    writer = CacheWriter(folder, FORMATS[name], shard_size=1 << 30)
    for key, features in zip(KEYS, FEATURES, strict=True):
        writer.add(key, features)
    for stream in writer._streams:  # the entries are in the file; nothing is committed
        stream._writing.drain()
    kept = tmp_path / "kept"
    shutil.copytree(folder / "shards", kept)
    with writer:
        pass
    for file in (folder / "shards").iterdir():
        file.unlink()
    left = [Path(shutil.copy(file, folder / "shards")) for file in kept.iterdir()]
    assert sorted(TEMPORARY_MARK in file.name for file in left) == [True, True]
    return folder, left


def journals_taken_up(tmp_path: Path, name: str, seed: int, count: int) -> Counter[str]:
    """Mutate the journal, take up what it names, and compare every entry."""
    folder, left = unfinished(tmp_path, name)
    (journal,) = [file for file in left if file.name.endswith(JOURNAL_SUFFIX)]
    whole, dice, manifest = journal.read_bytes(), random.Random(seed), load_manifest(folder)
    grids = [tuple(features.image_grid_thw.tolist()) for features in FEATURES]
    todo: list[Any] = [
        (SplitImage(path=key, key=key, image_grid_thw=grid, size=1, mtime_ns=1), ImageRef(key))
        for key, grid in zip(KEYS, grids, strict=True)
    ]
    tokens = {grid: len(f.image_embeds) for grid, f in zip(grids, FEATURES, strict=True)}
    sums = {key: checksum(features) for key, features in zip(KEYS, FEATURES, strict=True)}
    outcomes: Counter[str] = Counter()
    with small_allocations(MAX_MEMORY):
        for number in range(count):
            journal.write_bytes(mutated(whole, dice))
            taken = Taken(folder)
            try:
                rest = take_up(todo, taken, manifest, tokens.__getitem__, SILENT, lambda: False)  # type: ignore[arg-type]
                assert {image.key for image, _ in rest} == set(KEYS) - taken.sums.keys()
                assert all(sums[key] == found for key, found in taken.sums.items())
            except BaseException as error:
                raise AssertionError(f"seed {seed}, input {number}") from error
            outcomes[f"{len(taken.sums)} of {len(KEYS)}"] += 1
    return outcomes


class Taken:
    """Notes what a writer would be given."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sums = folder, dict[str, str]()

    def add(self, key: str, features: Any) -> None:
        self.sums[key] = checksum(features)


@pytest.mark.parametrize("name", ["webdataset"])
def test_a_sample_of_journals(tmp_path: Path, name: str) -> None:
    outcomes = journals_taken_up(tmp_path, name, seed=0, count=100)
    assert len(outcomes) > 1, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("name", FORMATS)
def test_many_journals(tmp_path: Path, name: str) -> None:
    assert journals_taken_up(tmp_path, name, seed=1, count=1000).total() == 1000
