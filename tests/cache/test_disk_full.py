"""A full disk, for real on a file system of 1 MB: what was committed counts, and nothing half-written stays."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cache.atomic import TEMPORARY_MARK
from cache.build import CacheBuilder
from cache.errors import ResourceError, StoppedError
from cache.formats import SafetensorsFormat
from cache.formats.base import OutputFile
from cache.journal import JOURNAL_SUFFIX, find_journals
from cache.manifest import SHARDS, load_shard_indexes, save_manifest
from cache.prune import remove_leftovers, survey_holdings
from cache.reader import FeatureCache
from cache.writer import CacheWriter
from pipeline.config import PipelineConfig

from ..manifests import manifest_of  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import SILENT, assert_same_entries, builder_of, committed_keys, fill, random_features, snapshot

PAGE = 4096  # tmpfs hands out whole pages


def moved(config: PipelineConfig, folder: Path, **cache: Any) -> PipelineConfig:
    return config.model_copy(update={"cache": config.cache.model_copy(update={"dir": folder, **cache})})


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_tidy(folder: Path) -> None:
    """No temporary file, no shard without an index: nothing that holds space and does not count."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert not [file.name for file in files if TEMPORARY_MARK in file.name]
    indexes = [file for file in files if file.parent.name == SHARDS and file.suffix == ".json"]
    shards = {file for file in files if file.suffix == ".safetensors"}
    assert shards == {file.with_suffix(".safetensors") for file in indexes}


def test_refuses_before_anything_is_spent(cached: Any, small_disk: Path, tower_calls: dict[str, int]) -> None:
    config = moved(cached[1], small_disk / "features")
    fill(small_disk, leave=2 * PAGE)
    before = snapshot(small_disk)
    with pytest.raises(ResourceError, match=r"GB are needed.*\n.*free some space"):
        builder_of(config).run("train", SILENT)
    assert tower_calls["load"] == 0
    # But for the note of what was hashed, so that it need not be hashed again, and the manifest that says whose it is.
    allowed = ("/scans/", "/manifest.json")
    after = {name: state for name, state in snapshot(small_disk).items() if not any(part in name for part in allowed)}
    assert after == before


def kill_with_an_unfinished_shard(builder: CacheBuilder, tower_calls: dict[str, int]) -> None:
    """Cache, and die as soon as an entry is in a shard's file."""

    def dies() -> bool:
        if not tower_calls["encode"]:
            return False
        wait_for(lambda: any(journal.stat().st_size for journal in find_journals(builder.folder)))
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = multiprocessing.get_context("fork").Process(
            target=builder.run, args=("train", SILENT), kwargs={"should_stop": dies}
        )
        child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def test_space_that_a_killed_run_holds_is_named_and_can_be_freed(
    cached: Any, small_disk: Path, tower_calls: dict[str, int]
) -> None:
    whole, config = cached
    config = moved(config, small_disk / "features")
    builder = builder_of(config)
    kill_with_an_unfinished_shard(builder, tower_calls)
    plan = builder.plan("train", SILENT)
    filler = fill(small_disk, leave=(plan.missing_bytes - 1) // PAGE * PAGE)
    with pytest.raises(ResourceError, match=r"(?s)GB are held by unfinished shards.*pipeline prune --leftovers --yes"):
        builder_of(config).run("train", SILENT)
    assert "not enough: the run would be refused; unfinished shards hold" in plan.describe()
    for file in builder.folder.glob(f"shards/*{TEMPORARY_MARK}*"):
        os.utime(file, (1, 1))  # an hour later
    assert remove_leftovers(survey_holdings(config.cache_dir, builder.fingerprint, any_backend=False))
    filler.unlink()
    assert builder_of(config).run("train", SILENT).encoded_images == 4
    assert_same_entries(builder.folder, whole.folder)
    assert_tidy(builder.folder)


@pytest.mark.parametrize("pages", [0, 1, 2, 4, 6, 8, 9, 10])
def test_a_disk_that_fills_up_midway(cached: Any, small_disk: Path, tower_calls: dict[str, int], pages: int) -> None:
    whole, config = cached
    config = moved(config, small_disk / "features", shard_size=1)
    builder = builder_of(config)
    filler: list[Path] = []

    def fills() -> bool:
        if tower_calls["encode"] == 2 and not filler:
            wait_for(lambda: len(committed_keys(builder.folder)) == 2)  # shards are committed in the background
            filler.append(fill(small_disk, leave=pages * PAGE))
        return False

    with pytest.raises(ResourceError, match="is full") as caught:
        builder.run("train", SILENT, should_stop=fills)
    assert str(small_disk) in str(caught.value.where)
    notes = getattr(caught.value, "__notes__", [])  # the one that is being committed may not fit either
    assert not [note for note in notes if str(caught.value.where) in note], "the shard that did not fit was tried again"
    assert_tidy(builder.folder)
    kept = committed_keys(builder.folder)
    assert 2 <= len(kept) <= 4  # with all 4 it is the split list that does not fit
    features = FeatureCache(builder.folder)
    assert sorted(features.keys()) == kept
    filler[0].unlink()
    assert builder_of(config).run("train", SILENT).encoded_images == 4 - len(kept)
    assert_same_entries(builder.folder, whole.folder)
    assert_tidy(builder.folder)


def test_the_split_list_does_not_fit(cached: Any, small_disk: Path) -> None:
    whole, config = cached
    config = moved(config, small_disk / "features")
    builder = builder_of(config)
    builder.run("train", SILENT)
    (builder.folder / "splits" / "train.json").unlink()
    filler = fill(small_disk, leave=0)
    with pytest.raises(ResourceError, match="is full"):
        builder_of(config).run("train", SILENT)
    assert_tidy(builder.folder)
    filler.unlink()
    assert builder_of(config).run("train", SILENT).encoded_images == 0
    assert_same_entries(builder.folder, whole.folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache folder without entries."""
    save_manifest(tmp_path / "cache", manifest_of("safetensors"))
    return tmp_path / "cache"


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Every flush to the disk but the first `n` finds it full, on machines without a small disk too."""

    def start(n: int) -> list[int]:
        flushes: list[int] = []
        fsync = os.fsync

        def full(descriptor: int) -> None:
            flushes.append(descriptor)
            if len(flushes) > n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        return flushes

    return start


@pytest.mark.parametrize("flushes", [0, 2])  # the shard does not fit; its index does not fit
def test_a_shard_that_cannot_be_committed_is_given_up(
    folder: Path, no_space: Callable[[int], list[int]], flushes: int
) -> None:
    writer = CacheWriter(folder, SafetensorsFormat(), shard_size=1)
    done = no_space(flushes)
    with pytest.raises(ResourceError, match="is full"), writer:
        writer.add("a" * 64, random_features(0))
    assert len(done) == flushes + 1, "tried again, or held on to"
    assert_tidy(folder)
    assert load_shard_indexes(folder) == []
    assert writer.committed_images == 0


@pytest.mark.parametrize("fits", [True, False])
def test_a_close_that_fails_hides_no_outcome_and_leaves_nothing(
    folder: Path, no_space: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """Network file systems tell only at the close that a journal, which is not needed any more, did not fit."""
    close, told = os.close, []

    def close_late(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        close(descriptor)
        if name.endswith(JOURNAL_SUFFIX):
            told.append(name)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", close_late)
    writer = CacheWriter(folder, SafetensorsFormat(), shard_size=1)
    if not fits:
        no_space(0)
    with nullcontext() if fits else pytest.raises(ResourceError, match="is full"), writer:
        writer.add("a" * 64, random_features(0))
    assert len(told) == 1
    assert_tidy(folder)
    assert committed_keys(folder) == ["a" * 64] * fits
    assert writer.committed_images == fits


def test_an_entry_that_does_not_fit_is_told_though_its_file_cannot_be_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = OutputFile.close

    def close_late(self: OutputFile) -> None:
        close(self)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def full(_descriptor: int, _content: bytes, _place: int) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(OutputFile, "close", close_late)
    monkeypatch.setattr(os, "pwrite", full)
    writer = CacheWriter(folder, SafetensorsFormat(), shard_size=1 << 30)
    with pytest.raises(ResourceError, match="is full"), writer:
        writer.add("a" * 64, random_features(0))
    assert_tidy(folder)


def end_with(folder: Path, error: Exception) -> None:
    """Let the work end with `error` while an entry is held in memory."""
    with CacheWriter(folder, SafetensorsFormat(), shard_size=1 << 30) as writer:
        writer.add("a" * 64, random_features(0))
        raise error


def test_an_earlier_error_is_the_one_that_is_told(folder: Path, no_space: Callable[[int], list[int]]) -> None:
    no_space(0)
    with pytest.raises(ZeroDivisionError) as caught:
        end_with(folder, ZeroDivisionError())
    assert "could not be written either" in caught.value.__notes__[0]
    assert "is full" in caught.value.__notes__[0]
    assert_tidy(folder)


def test_a_stop_does_not_promise_what_could_not_be_kept(folder: Path, no_space: Callable[[int], list[int]]) -> None:
    no_space(0)
    with pytest.raises(ResourceError, match="is full"):
        end_with(folder, StoppedError("everything is kept"))
    assert_tidy(folder)


def test_the_format_says_why_it_cannot_write(small_disk: Path) -> None:
    fill(small_disk, leave=0)
    with pytest.raises(OSError, match="No space left") as caught:
        SafetensorsFormat().write(small_disk / "shard", [("a" * 64, random_features(0, tokens=1000))])
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(small_disk / "shard")
