"""SIGKILL while a cache is repacked, repaired or staged: nothing is lost, and given again the command ends as usual."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.formats import FORMATS
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.repack import repack
from cache.repair import set_damaged_aside
from cache.staging import stage
from cache.verify import verify_cache

from .conftest import assert_same, committed_keys, snapshot
from .test_remote import FEATURES, KEYS, make_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
SILENT = Silent()
FORMAT_OF_COPY = {"safetensors": "hdf5", "webdataset": "safetensors", "hdf5": "webdataset"}


def die_at_step(step: int) -> None:
    """Die before the `step`-th call that changes the disk: these are all between which the work can be cut."""
    steps = iter(range(1, step + 1))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return wrapped

    for name in ("fsync", "replace", "rename", "pwrite", "unlink", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))


def killed(work: Callable[[], object], step: int | None, *, after: float | None = None) -> bool:
    """Do it in a process that dies at a step or after some time; returns whether it died before it was done."""

    def armed() -> None:
        if step is not None:
            die_at_step(step)
        work()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = multiprocessing.get_context("fork").Process(target=armed)
        child.start()
    if after is not None:
        child.join(after)
        child.kill()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def assert_right(folder: Path, keys: list[str]) -> None:
    """What is listed are these keys, each once, with the features that they were given."""
    assert committed_keys(folder) == keys
    cache = FeatureCache(folder)
    for key in keys:
        assert_same(cache.read(key), FEATURES[KEYS.index(key)])


class Work:
    """A command over a cache of its own, and what must hold after a kill and at the end."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        self.source = make_cache(root / "source", name)

    def __call__(self) -> None:
        raise NotImplementedError

    def check_after_a_kill(self) -> None:
        raise NotImplementedError

    def check_the_end(self) -> None:
        raise NotImplementedError


class Repacking(Work):
    """Into another format and smaller shards."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root, name)
        self.before = snapshot(self.source)
        self.options = {"format": FORMAT_OF_COPY[name], "shard_size": 2 * FEATURES[0].num_bytes, "dtype": None}

    def __call__(self) -> None:
        self.copy = repack(FeatureCache(self.source), self.root / "copy", progress=SILENT, **self.options)  # type: ignore[arg-type]

    def check_after_a_kill(self) -> None:
        assert snapshot(self.source) == self.before
        for folder in (self.root / "copy").glob("*"):
            if (folder / "manifest.json").exists():
                assert_right(folder, committed_keys(folder))

    def check_the_end(self) -> None:
        assert_right(self.copy, KEYS)
        assert FeatureCache(self.copy).split("train") == FeatureCache(self.source).split("train")
        assert snapshot(self.source) == self.before


class Repairing(Work):
    """One of three entries of a shard is damaged, and a list."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root, name)
        cache = FeatureCache(self.source)
        shard = self.source / "shards" / cache.shard_of(KEYS[0]).shard
        where = FORMATS[name].open(shard).extents(KEYS[0]).image_embeds.offset
        for file, place in ((shard, where + 5), (self.source / "splits/val.json", 30)):
            content = bytearray(file.read_bytes())
            content[place] ^= 16
            file.write_bytes(content)

    def __call__(self) -> None:
        set_damaged_aside(self.source, FORMATS[self.name], 1 << 30, SILENT)

    def check_after_a_kill(self) -> None:
        assert set(KEYS[1:]) <= set(committed_keys(self.source)), "an intact entry is not listed"

    def check_the_end(self) -> None:
        assert_right(self.source, KEYS[1:])
        assert verify_cache(self.source, SILENT).damages == []
        names = [file.name for file in (self.source / "damaged").iterdir()]
        assert [name for name in names if name.startswith("val.json")], "deleted instead of moved aside"


class Staging(Work):
    """Copies to a node's disk."""

    def __call__(self) -> None:
        self.copy = stage(FeatureCache(self.source), self.root / "disk", ["train"], SILENT).folder

    def check_after_a_kill(self) -> None:
        for folder in (self.root / "disk").glob("*"):
            if (folder / "manifest.json").exists():
                assert_right(folder, committed_keys(folder))

    def check_the_end(self) -> None:
        assert_right(self.copy, KEYS)


def deaths_at_steps(tmp_path: Path, kind: type[Work], name: str, *, every: int) -> None:
    step = 1
    while True:
        work = kind(tmp_path / str(step), name)
        if not killed(work, step):
            break
        work.check_after_a_kill()
        work()
        work.check_the_end()
        shutil.rmtree(work.root)
        step += every
    assert step > 10


@pytest.mark.parametrize(("kind", "name"), [(Repacking, "webdataset"), (Repairing, "hdf5"), (Staging, "safetensors")])
def test_death_at_some_steps(tmp_path: Path, kind: type[Work], name: str) -> None:
    deaths_at_steps(tmp_path, kind, name, every=8)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [Repacking, Repairing, Staging])
def test_death_at_every_step(tmp_path: Path, kind: type[Work], name: str) -> None:
    deaths_at_steps(tmp_path, kind, name, every=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [Repacking, Repairing, Staging])
def test_deaths_at_many_instants(tmp_path: Path, kind: type[Work], name: str) -> None:
    """Each cache is killed again and again until the command gets through."""
    timed = kind(tmp_path / "timed", name)
    started = time.perf_counter()
    assert not killed(timed, None)
    whole_time = time.perf_counter() - started
    dice, deaths, number = random.Random(8), 0, 0
    while deaths < 60:
        number += 1
        work = kind(tmp_path / str(number), name)
        while killed(work, None, after=dice.uniform(0, whole_time)):
            deaths += 1
            work.check_after_a_kill()
        work()
        work.check_the_end()
        shutil.rmtree(work.root)
