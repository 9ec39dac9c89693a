"""The disk fills up at the n-th write of a command, for every n: the same promises wherever it happens.

What a full disk does to calls is simulated here (every call that takes space fails from the n-th on); that a real one
does so is in test_disk_full.py. What the HDF5 library writes by itself is met there only.
"""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache import writer
from cache.atomic import TEMPORARY_MARK
from cache.manifest import SHARDS
from cache.reader import FeatureCache
from pipeline.cli import app
from pipeline.config import PipelineConfig
from pipeline.exit import exit_code_of

from .conftest import assert_same_entries, draw_images, write_rows
from .test_crash import assert_sound

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
FORK = multiprocessing.get_context("fork")


class FullDisk:
    """Within a folder, every call that takes space fails from the `full_at`-th on.

    Attributes:
        calls: how many there were.
    """

    def __init__(self, folder: Path, full_at: int) -> None:
        self._folder, self._full_at = str(folder), full_at
        self.calls = FORK.Value("i", 0)

    def install(self) -> None:
        """In this process, for good."""
        os.write, os.pwrite = self._of_descriptor(os.write), self._of_descriptor(os.pwrite)
        os.fsync, os.posix_fallocate = self._of_descriptor(os.fsync), self._of_descriptor(os.posix_fallocate)
        os.mkdir = self._of_path(os.mkdir, lambda *_a, **_k: True)
        os.replace, os.rename = self._of_target(os.replace), self._of_target(os.rename)
        os.open = self._of_path(os.open, lambda flags, *_a, **_k: flags & os.O_CREAT)
        io.open = self._of_path(io.open, lambda mode="r", *_a, **_k: set(mode) & set("wxa"))  # what Path.open calls

    def _take(self, path: str) -> None:
        if not path.startswith(self._folder):
            return
        with self.calls.get_lock():
            self.calls.value += 1
            if self.calls.value >= self._full_at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _of_descriptor(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(descriptor: int, *args: Any) -> Any:
            self._take(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            return call(descriptor, *args)

        return wrapped

    def _of_target(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(source: Any, target: Any, *args: Any, **more: Any) -> Any:
            self._take(os.fspath(target))
            return call(source, target, *args, **more)

        return wrapped

    def _of_path(self, call: Callable[..., Any], takes_space: Callable[..., object]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **more: Any) -> Any:
            if takes_space(*args, **more):
                self._take(os.fspath(path) if isinstance(path, str | os.PathLike) else "")
            return call(path, *args, **more)

        return wrapped


def run(arguments: Sequence[object], log: Path, disk: FullDisk | None = None) -> int:
    """A command as the console script runs it, in a process of its own; returns its exit code."""

    def work() -> None:
        with log.open("wb") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        if disk is not None:
            disk.install()
        code = exit_code_of(lambda: app([str(a) for a in arguments], standalone_mode=False, prog_name="pipeline"))
        sys.stderr.flush()
        os._exit(code)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = FORK.Process(target=work)
        child.start()
    child.join(120)
    assert child.exitcode is not None, "hangs"
    return child.exitcode


@dataclass(frozen=True)
class Case:
    """A command, and what surrounds it.

    Attributes:
        arguments: of the command.
        begin: makes a folder as it is before the command.
        check: that a folder is as it should be when the command was successful.
    """

    arguments: Callable[[Path], list[object]]
    begin: Callable[[Path], None]
    check: Callable[[Path], None]


def settings_of(config: PipelineConfig, place: Path) -> Path:
    """The configuration with everything that is written below `place`."""
    content = json.loads(config.model_dump_json(exclude_unset=True))
    content["output_dir"] = str(place / "run")
    place.mkdir(exist_ok=True)
    file = place.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(content))
    return file


def only_folder(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


def caching(config: PipelineConfig, whole: Path) -> Case:
    def check(place: Path) -> None:
        assert_same_entries(only_folder(place / "run/features"), only_folder(whole / "run/features"))
        for name in ("cache-train.json", "train.rejected.jsonl"):
            assert (place / "run" / name).is_file(), name
        rejected = (place / "run/train.rejected.jsonl").read_text()
        assert rejected == (whole / "run/train.rejected.jsonl").read_text()

    return Case(
        lambda place: ["cache", "--config", settings_of(config, place), "--split", "train"], lambda _: None, check
    )


def repacking(config: PipelineConfig, whole: Path) -> Case:
    def arguments(place: Path) -> list[object]:
        settings = settings_of(config, place)
        return ["repack", "--config", settings, "--format", "hdf5", "--output", place / "copy", "--shard-size", 9000]

    def begin(place: Path) -> None:
        shutil.copytree(whole, place, dirs_exist_ok=True)

    def check(place: Path) -> None:
        assert_same_entries(only_folder(place / "copy"), only_folder(whole / "run/features"))
        assert FeatureCache(only_folder(place / "copy")).split("train").refused

    return Case(arguments, begin, check)


def repairing(config: PipelineConfig, whole: Path) -> Case:
    def begin(place: Path) -> None:
        shutil.copytree(whole, place, dirs_exist_ok=True)
        folder = only_folder(place / "run/features")
        shards = sorted(file for file in (folder / SHARDS).iterdir() if file.suffix != ".json")
        for file, byte in ((shards[0], -5), (shards[1].with_suffix(".json"), 100), (folder / "splits/train.json", 30)):
            content = bytearray(file.read_bytes())
            content[byte] ^= 1
            file.write_bytes(content)

    plain = caching(config, whole)
    return Case(lambda place: [*plain.arguments(place), "--repair"], begin, plain.check)


CASES = {"cache": caching, "repack": repacking, "repair": repairing}


def shards_in(place: Path) -> set[bytes]:
    """The content of every shard, wherever it was moved."""
    kinds = (".safetensors", ".tar", ".h5")
    return {file.read_bytes() for file in place.rglob("*") if any(kind in file.name for kind in kinds)}


def assert_nothing_lost(place: Path, whole: Path, before: set[bytes], *, damaged: bool) -> None:
    """No shard is gone, what is listed is right, and nothing holds space that does not count.

    Args:
        damaged: the command is one that mends, and may not have come to it.
    """
    assert before <= shards_in(place)
    files = [file for file in place.rglob("*") if file.is_file()]
    assert not [file.name for file in files if TEMPORARY_MARK in file.name]
    if damaged:
        return
    for root in (place / "run/features", place / "copy"):
        if root.is_dir():
            assert_sound(root, FeatureCache(only_folder(whole / "run/features")))
    shards = [file for file in files if file.parent.name == SHARDS and file.suffix != ".json"]
    assert all(file.with_suffix(".json").exists() for file in shards)


def full_at_some_of_all(
    tmp_path: Path, make_config: Any, name: str, shard_format: str, choose: Callable[[int], Sequence[int]]
) -> None:
    """Fill the disk at those of a command's writes that `choose` takes, free it, and give the command again."""
    images = draw_images(tmp_path / "images", 4)
    (tmp_path / "images/bad.png").write_bytes(images[0].read_bytes()[:60])
    rows = write_rows(tmp_path / "train.jsonl", [*images, tmp_path / "images/bad.png"])
    report = {"on_bad_record": "report", "max_bad_share": 0.5}
    config = make_config({"train": str(rows)}, cache={"shard_size": 12_000, "format": shard_format})
    config = config.model_copy(update={"data": config.data.model_copy(update=report)})
    whole, log = tmp_path / "whole", tmp_path / "log"
    assert run(caching(config, whole).arguments(whole), log) == 0, log.read_text()
    case, disk = CASES[name](config, whole), FullDisk(tmp_path / "all", 1 << 30)
    case.begin(tmp_path / "all")
    assert run(case.arguments(tmp_path / "all"), log, disk) == 0, log.read_text()
    case.check(tmp_path / "all")
    for full_at in choose(disk.calls.value):
        place = tmp_path / f"at-{full_at}"
        case.begin(place)
        arguments, before = case.arguments(place), shards_in(place)
        code, said = run(arguments, log, FullDisk(place, full_at)), log.read_text()
        assert code == 5, f"{full_at}: {said}"
        assert "is full" in said, f"{full_at}: {said}"
        assert "Traceback" not in said, f"{full_at}: {said}"
        assert_nothing_lost(place, whole, before, damaged=name == "repair")
        assert run(arguments, log) == 0, f"{full_at}: {log.read_text()}"
        case.check(place)
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("name", "shard_format"), [("cache", "hdf5"), ("repack", "safetensors"), ("repair", "webdataset")]
)
def test_a_disk_that_fills_up_at_some_writes(tmp_path: Path, make_config: Any, name: str, shard_format: str) -> None:
    full_at_some_of_all(tmp_path, make_config, name, shard_format, lambda n: random.Random(0).sample(range(1, n), 2))


def test_a_disk_that_fills_up_while_two_shards_are_written(
    tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LARGE_ENTRY", 0)
    full_at_some_of_all(
        tmp_path, make_config, "cache", "safetensors", lambda n: random.Random(1).sample(range(1, n * 4 // 5), 4)
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard_format", ["safetensors", "webdataset", "hdf5"])
@pytest.mark.parametrize("name", CASES)
def test_a_disk_that_fills_up_at_every_write(tmp_path: Path, make_config: Any, name: str, shard_format: str) -> None:
    full_at_some_of_all(tmp_path, make_config, name, shard_format, lambda n: range(1, n + 1))
