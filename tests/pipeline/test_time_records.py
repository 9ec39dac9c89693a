"""What is kept of the jobs that have run, and which of it a prediction goes by."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.progress import Silent
from pipeline.time_measured import Found, choose, training_phases
from pipeline.time_records import JobClock, Phase, TimeRecord, phase_of
from pipeline.time_span import Span


def test_the_first_bit_of_a_phase_is_work_but_not_part_of_its_rate() -> None:
    found = phase_of([(60.0, 1), (1.0, 1), (1.2, 1), (0.8, 1)])

    assert found == Phase(4, pytest.approx(1.0), 0.8, 1.2)
    assert phase_of([(3.0, 2)]) == Phase(2, 1.5, 1.5, 1.5)
    assert phase_of([]) is None


def _record(seconds: float, written: float, phase: Phase, **fields: Any) -> TimeRecord:
    return replace(TimeRecord("train", "gpu", 1, {"a": 1}, seconds, {"tokens": phase}, written), **fields)


def test_what_is_in_no_phase_is_the_constant() -> None:
    assert _record(100, 0, Phase(400, 0.2, 0.1, 0.3)).constant == 20


def test_runs_with_the_same_settings_and_device_are_taken_together_and_others_left_out() -> None:
    found = [
        Found(_record(130, 3, Phase(1000, 0.1, 0.09, 0.12)), "new"),
        Found(_record(240, 2, Phase(1000, 0.2, 0.2, 0.2)), "old"),
        Found(_record(9, 1, Phase(1000, 9.0, 9.0, 9.0), device="another"), "elsewhere"),
        Found(_record(9, 1, Phase(1000, 9.0, 9.0, 9.0), setting={"a": 2}), "otherwise"),
    ]

    taken = choose(found, "train", {"a": 1})
    assert taken is not None
    assert taken.rates["tokens"] == Span(0.09, pytest.approx(0.15), 0.2)
    assert taken.constant == Span(30, 35, 40)
    assert "new" in taken.source
    other = choose(found[:2], "train", {"a": 5})
    assert other is not None
    assert "measured with other settings: a 1" in other.source
    assert choose(found, "eval", {"a": 1}) is None


def test_the_log_of_a_training_tells_its_rate_also_when_a_kill_has_cut_it_off(tmp_path: Path) -> None:
    line = {"max_steps": 9, "seconds": 2.0, "samples_per_second": 8.0, "tokens_per_second": 100.0}
    lines = [json.dumps({"step": step, **line}) for step in (1, 2, 3, 4)]
    lines.append(json.dumps({"step": 4, "eval_runtime": 3.0, "eval_samples_per_second": 2.0}))
    lines.append(json.dumps({"step": 4, "save_runtime": 1.5}))
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "sec']))

    found = training_phases(tmp_path, from_step=1, batch=16)

    assert found["tokens"] == Phase(600, 0.01, 0.01, 0.01)
    assert found["evaluating"].seconds == 0.5
    assert found["saving"] == Phase(1, 1.5, 1.5, 1.5)


def test_a_job_that_fails_leaves_no_record_and_other_processes_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = _record(0, 0, Phase(1, 1, 1, 1), phases={})

    def work(fails: bool) -> None:
        with JobClock(Silent(), tmp_path, "job", blank) as clock:
            clock.start("encoding images", 2, "image")
            clock.advance()
            clock.advance()
            clock.finish()
            if fails:
                raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        work(True)
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "RANK", "1")
        work(False)
    assert not (tmp_path / "times").exists()
    work(False)
    written = TimeRecord.parse(json.loads((tmp_path / "times" / "job.json").read_text()))
    assert written is not None
    assert written.phases["encoding"].units == 2


def _measure(folder: Path, images: int, **setting: Any) -> None:
    record = TimeRecord("cache", "cpu", 1, {"pair": (1, 2), **setting}, 0.0, {}, 0.0)
    with JobClock(Silent(), folder, "cache-train", record, needs="encoding") as clock:
        clock.start("reading images", 3, "image")
        clock.finish()
        if images:
            clock.start("encoding images", images, "image")
            clock.advance(images)
            clock.finish()


def test_a_small_addition_leaves_what_a_large_run_has_measured(tmp_path: Path) -> None:
    def units() -> float:
        found = TimeRecord.parse(json.loads((tmp_path / "times" / "cache-train.json").read_text()))
        assert found is not None
        return found.phases["encoding"].units

    _measure(tmp_path, 100)
    for images, known in ((0, 100), (3, 100), (60, 60), (200, 200)):
        _measure(tmp_path, images)
        assert units() == known
    _measure(tmp_path, 2, tower="fast")
    assert units() == 2, "another setting is another rate"
