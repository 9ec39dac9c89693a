"""A benchmark's run is a new one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from train.run_folder import METRICS_FILE, RUN_FILE

from .train_command import pipeline, train_anew


def _log(folder: Path, *lines: dict[str, float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def test_figures_of_an_earlier_run_are_never_given(tmp_path: Path) -> None:
    output = tmp_path / "run"
    _log(output, {"step": 1, "samples_per_second": 1.0})
    (output / RUN_FILE).write_text('{"finished": {"max_steps": 1}}')

    def train() -> None:
        assert not output.exists()
        _log(output, {"step": 1, "samples_per_second": 2.0}, {"step": 1, "train_runtime": 3.0})

    assert train_anew(train, output) == [{"step": 1, "samples_per_second": 2.0}]


def test_a_run_that_logs_nothing_is_an_error(tmp_path: Path) -> None:
    _log(tmp_path / "run", {"step": 1, "samples_per_second": 1.0})
    with pytest.raises(FileNotFoundError):
        train_anew(lambda: None, tmp_path / "run")


def test_a_benchmark_can_be_ended_after_a_verb(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error:
        pipeline("train", "--config", str(tmp_path / "missing.yaml"), "--from-cache")
    assert error.value.code == 2
    assert signal.getsignal(signal.SIGTERM) == before
