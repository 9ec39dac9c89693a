"""SIGKILL at any moment: what is listed is whole, and the same command ends where an undisturbed run ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.atomic import TEMPORARY_MARK
from cache.errors import StoppedError
from cache.files import fingerprint_folders
from cache.formats import SafetensorsFormat
from cache.journal import JOURNAL_SUFFIX
from cache.parts import WHOLE, Part
from cache.progress import Silent
from cache.reader import FeatureCache
from pipeline.cache_figures import report, report_together
from pipeline.config import PipelineConfig

from .conftest import SILENT, assert_same, assert_same_entries, builder_of, committed_keys

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_step(step: int) -> None:
    """Die before the `step`-th flush or rename: these are all the steps between which a commit can be cut."""
    steps = iter(range(1, step + 1))

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any) -> None:
            if next(steps) == step:
                die()
            call(*args)

        return wrapped

    os.fsync, os.replace = counted(os.fsync), counted(os.replace)


def die_halfway_through_a_shard(number: int) -> None:
    """Die when half the bytes of the first entry of the `number`-th shard are written."""
    create, shards = SafetensorsFormat.create, iter(range(1, number + 1))

    def last(self: SafetensorsFormat, path: Path, num_entries: int) -> Any:
        shard = create(self, path, num_entries)
        if next(shards) == number:
            append = shard.append

            def half(key: str, features: Any) -> None:  # nothing is noted of it
                append(key, features)
                os.truncate(path, path.stat().st_size // 2)
                die()

            shard.append = half  # type: ignore[method-assign]
        return shard

    SafetensorsFormat.create = last  # type: ignore[method-assign]


def run_in_child(config: PipelineConfig, arm: Callable[[int], None] | None, value: int, *, after: float = 0) -> bool:
    """Cache in a process that is killed; returns whether it was killed before it was done."""

    def work() -> None:
        if arm is not None:
            arm(value)
        builder_of(config).run("train", SILENT)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
    if arm is None:
        time.sleep(after)
        child.kill()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def held_keys(folder: Path) -> set[str]:
    """The keys that are committed, or noted in a journal: what need not be encoded again."""
    journals = [file.read_text() for file in folder.glob(f"**/shards/*{JOURNAL_SUFFIX}")]
    lines = [line for text in journals for line in text.split("\n")[:-1]]
    return {*committed_keys(folder), *(json.loads(line)["entry"]["key"] for line in lines)}


def assert_sound(folder: Path, whole: FeatureCache) -> None:
    """Whatever is listed can be read, equals the undisturbed run, and is listed once."""
    for found in fingerprint_folders(folder):
        cache = FeatureCache(found)
        assert committed_keys(found) == cache.keys()
        for key in cache.keys():  # noqa: SIM118  (not a mapping)
            assert_same(cache.read(key), whole.read(key))


def assert_recovers(config: PipelineConfig, whole: FeatureCache) -> None:
    assert_sound(config.cache_dir, whole)
    before, held = committed_keys(config.cache_dir), held_keys(config.cache_dir)
    summary = builder_of(config).run("train", SILENT)
    assert summary.encoded_images == len(whole) - len(held)
    assert summary.recovered_images == len(held) - len(before)
    assert_same_entries(summary.folder, whole.folder)
    assert committed_keys(summary.folder) == whole.keys()
    assert [i.path for i in FeatureCache(summary.folder).split("train").images] == [
        i.path for i in whole.split("train").images
    ]


def moved(config: PipelineConfig, folder: Path) -> PipelineConfig:
    return config.model_copy(update={"cache": config.cache.model_copy(update={"dir": folder})})


def test_death_at_every_step_of_the_commits(tmp_path: Path, cached: Any) -> None:
    config = cached[1].model_copy(update={"cache": cached[1].cache.model_copy(update={"shard_size": 24_000})})
    config = moved(config, tmp_path / "whole")  # in two shards: each more is as many more deaths, of the same kinds
    whole = FeatureCache(builder_of(config).run("train", SILENT).folder)
    step, kept = 1, set()
    while run_in_child(moved(config, tmp_path / str(step)), die_at_step, step):
        kept.add(len(committed_keys(tmp_path / str(step))))
        assert_recovers(moved(config, tmp_path / str(step)), whole)
        step += 1
    shards = len(list((whole.folder / "shards").glob("*.json")))
    assert shards == 2
    assert step == 1 + 3 * (2 * shards + 4), "scan, manifest, split list and index file; shard and index of each shard"
    assert {0, len(whole)} <= kept
    assert len(kept) == shards + 1


@pytest.mark.parametrize("number", [1, 2])
def test_death_in_the_middle_of_a_shard(tmp_path: Path, cached: Any, number: int) -> None:
    whole, config = FeatureCache(cached[0].folder), moved(cached[1], tmp_path / "other")
    assert run_in_child(config, die_halfway_through_a_shard, number)
    left = [file.name for file in config.cache_dir.rglob(f"*{TEMPORARY_MARK}*")]
    shards = [name for name in left if not name.endswith(JOURNAL_SUFFIX)]
    assert 1 <= len(shards) <= 2, "the shard that was filled, and the one before it if it was being committed"
    assert len(left) - len(shards) <= number - 1, "the journal of the one before"
    listed = "".join(file.read_text() for file in config.cache_dir.rglob("*.json"))
    assert not [name for name in left if name in listed]
    assert_recovers(config, whole)


def test_many_deaths_in_a_row(tmp_path: Path, cached: Any) -> None:
    whole, config = FeatureCache(cached[0].folder), moved(cached[1], tmp_path / "other")
    dice, deaths = random.Random(0), 0
    while run_in_child(config, die_at_step, dice.randint(6, 10)):
        deaths += 1
        assert_sound(config.cache_dir, whole)
        assert deaths < 20, "no run gets any further"
    assert deaths > 1
    assert_recovers(config, whole)


def killed_with_some_in_hand(config: PipelineConfig) -> set[str]:
    """Killed before the first shard is flushed; returns the keys that it leaves, all in unfinished shards."""
    assert run_in_child(config, die_at_step, 10)
    assert committed_keys(config.cache_dir) == []
    held = held_keys(config.cache_dir)
    assert held
    return held


def test_a_restart_says_what_it_takes_up_and_encodes_only_the_rest(
    tmp_path: Path, cached: Any, tower_calls: dict[str, int]
) -> None:
    whole, config = FeatureCache(cached[0].folder), moved(cached[1], tmp_path / "other")
    held, encoded = killed_with_some_in_hand(config), tower_calls["encode"]
    summary = builder_of(config).run("train", SILENT)
    assert (summary.recovered_images, summary.encoded_images) == (len(held), len(whole) - len(held))
    assert tower_calls["encode"] - encoded == summary.encoded_images
    assert f"taken up         {len(held)} images of an interrupted run" in report(config, summary, WHOLE)
    assert_same_entries(summary.folder, whole.folder)
    again = builder_of(config).run("train", SILENT)
    assert (again.recovered_images, again.encoded_images) == (0, 0)
    assert "taken up" not in report(config, again, WHOLE)


def test_parts_take_up_their_shares(tmp_path: Path, cached: Any) -> None:
    whole, config = FeatureCache(cached[0].folder), moved(cached[1], tmp_path / "other")
    held, parts = killed_with_some_in_hand(config), [Part(number, 2) for number in range(2)]
    for part in parts:
        summary = builder_of(config).run("train", SILENT, part=part)
        assert summary.recovered_images == sum(map(part.has, held))
        assert summary.encoded_images == sum(part.has(key) and key not in held for key in whole.keys())  # noqa: SIM118
        report(config, summary, part)
    assert f"taken up         {len(held)} images" in report_together(config, "train", parts)
    assert committed_keys(config.cache_dir) == whole.keys()
    assert_same_entries(summary.folder, whole.folder)


class Phases(Silent):
    """Notes what is begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start(self, what: str, total: int, unit: str) -> None:
        self.begun.append(what)


def test_a_stop_while_images_are_taken_up_loses_nothing(
    tmp_path: Path, cached: Any, tower_calls: dict[str, int]
) -> None:
    whole, config = FeatureCache(cached[0].folder), moved(cached[1], tmp_path / "other")
    held, phases, encoded = killed_with_some_in_hand(config), Phases(), tower_calls["encode"]
    with pytest.raises(StoppedError, match="is kept"):
        builder_of(config).run("train", phases, lambda: any("interrupted" in what for what in phases.begun))
    assert len(committed_keys(config.cache_dir)) == 1
    assert tower_calls["encode"] == encoded
    assert held_keys(config.cache_dir) == held
    summary = builder_of(config).run("train", SILENT)
    assert summary.recovered_images == len(held) - 1
    assert_same_entries(summary.folder, whole.folder)


def deaths_in_time(tmp_path: Path, cached: Any, count: int, seed: int) -> None:
    whole, config = FeatureCache(cached[0].folder), cached[1]
    started = time.perf_counter()
    run_in_child(moved(config, tmp_path / "timed"), lambda _: None, 0)
    whole_time = time.perf_counter() - started
    dice = random.Random(seed)
    for number in range(count):
        this = moved(config, tmp_path / str(number))
        run_in_child(this, None, 0, after=dice.uniform(0, whole_time))
        assert_recovers(this, whole)


def test_death_at_some_instants(tmp_path: Path, cached: Any) -> None:
    deaths_in_time(tmp_path, cached, 3, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_death_at_many_instants(tmp_path: Path, cached: Any) -> None:
    deaths_in_time(tmp_path, cached, 100, seed=2)
