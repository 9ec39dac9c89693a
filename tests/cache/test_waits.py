"""The stage that is slowest is the one that the others are said to wait for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cache import build
from cache.formats import SafetensorsFormat
from cache.progress import Silent
from cache.vision_tower import VisionTower
from cache.waits import DISK, IMAGES, TOWER, Waits
from cache.writer import CacheWriter
from pipeline.cache_figures import report
from pipeline.config import PipelineConfig

from .conftest import builder_of, draw_images, random_features, write_rows

COUNT, PAUSE = 7, 0.25  # so long that a loaded machine is not taken for the slowest stage


def _slow_images(monkeypatch: pytest.MonkeyPatch) -> None:
    load = build.load_pixels

    def slow(*arguments: Any) -> Iterator[Any]:
        for pixels in load(*arguments):
            time.sleep(PAUSE)
            yield pixels

    monkeypatch.setattr(build, "load_pixels", slow)


def _slow_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = VisionTower.encode

    def slow(*arguments: Any) -> Any:
        time.sleep(PAUSE)
        return encode(*arguments)

    monkeypatch.setattr(VisionTower, "encode", slow)


def _slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    create = SafetensorsFormat.create

    def slow_file(*arguments: Any) -> Any:
        shard = create(*arguments)
        append = shard.append

        def slow(*entry: Any) -> Any:
            time.sleep(PAUSE)
            return append(*entry)

        shard.append = slow  # type: ignore[method-assign]
        return shard

    monkeypatch.setattr(SafetensorsFormat, "create", slow_file)


SLOW = {IMAGES: _slow_images, TOWER: _slow_tower, DISK: _slow_disk}


@pytest.mark.parametrize("slowest", list(SLOW))
def test_the_slowest_stage_is_named(
    slowest: str, tmp_path: Path, make_config: Callable[..., PipelineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", COUNT))
    # Shards so small that an entry waits for the one before it.
    config = make_config({"train": str(rows)}, cache={"num_workers": 0, "shard_size": 1000})
    SLOW[slowest](monkeypatch)

    summary = builder_of(config).run("train", Silent())

    assert set(summary.waited) == set(SLOW)
    assert max(summary.waited, key=summary.waited.__getitem__) == slowest
    assert (COUNT - 3) * PAUSE < summary.waited[slowest] <= summary.seconds
    line = next(line for line in report(config, summary, build.WHOLE).splitlines() if "waited for" in line)
    told = re.search(rf"{slowest} (\d+)%", line)
    assert told is not None
    assert int(told[1]) == pytest.approx(100 * summary.waited[slowest] / summary.seconds, abs=1)
    assert ("more cache.num_workers than 0 may help" in line) == (slowest == IMAGES)


def test_what_an_interrupted_run_left_is_taken_up_before_the_time_counts(
    tmp_path: Path, make_config: Callable[..., PipelineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", COUNT))
    config = make_config({"train": str(rows)}, cache={"num_workers": 0, "shard_size": 1000})
    _slow_disk(monkeypatch)

    def recovered(todo: list[Any], writer: CacheWriter, *_: Any) -> list[Any]:
        for number, (image, _ref) in enumerate(todo[:-1]):
            writer.add(image.key, random_features(number))
        return todo[-1:]

    monkeypatch.setattr(build, "take_up", recovered)
    summary = builder_of(config).run("train", Silent())

    assert summary.recovered_images == COUNT - 1
    assert summary.waited[DISK] <= summary.seconds < (COUNT - 2) * PAUSE


def test_each_gives_the_same_items_and_counts_while_they_come() -> None:
    def items() -> Iterator[int]:
        for number in range(3):
            time.sleep(PAUSE)
            yield number

    waits = Waits("here")
    assert list(waits.each("here", items())) == [0, 1, 2]
    assert waits.seconds["here"] >= 3 * PAUSE


def test_time_until_an_error_counts() -> None:
    waits = Waits("here")

    def fail() -> None:
        with waits.on("here"):
            time.sleep(PAUSE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert waits.seconds["here"] >= PAUSE
