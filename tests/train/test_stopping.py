"""Requests to stop that come before the first step: honoured between records, and again before training begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cache.build import CacheBuilder
from cache.errors import StoppedError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.run import run_training

from .conftest import Run, job_of
from .processes import Event, prepare

pytestmark = pytest.mark.timeout(900)


class Told:
    """A Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self, what: str, total: int, unit: str) -> None:
        self.lines.append(f"start {what}")

    def advance(self, count: int = 1) -> None:
        self.lines.append("advance")

    def finish(self) -> None:
        self.lines.append("finish")


@pytest.fixture
def config(data_dir: Path, make_config: Callable[..., PipelineConfig]) -> PipelineConfig:
    made = make_config({"train": str(data_dir / "train.jsonl")}, train={"max_steps": 2, "eval_split": None})
    CacheBuilder(made.model, made.data, made.cache, made.cache_dir).run("train", Silent())
    return made


def test_a_stop_while_data_is_prepared_waits_for_no_model(config: PipelineConfig) -> None:
    told = Told()
    with pytest.raises(StoppedError, match="stopped before training") as error:
        run_training(job_of(config), told, lambda: told.lines.count("advance") == 5)
    assert error.value.do == "run the same command to go on"
    compared = ["start comparing images with the cache's list", "advance", "finish"]
    assert told.lines == [*compared, "start tokenizing train", *4 * ["advance"], "finish"]
    run_training(job_of(config), Silent())
    assert list(Run(config.output_dir).losses()) == [1, 2]


def test_a_stop_within_an_epoch_evaluates_nothing(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    settings = {"eval_split": "val", "num_train_epochs": 2, "effective_batch_size": 8}

    def evaluated(folder: Path) -> list[int]:
        return [line["step"] for line in Run(folder).lines() if "eval_loss" in line]

    with pytest.raises(StoppedError):
        run_cached("stopped", stop_at=2, **settings)
    assert evaluated(tmp_path / "stopped") == []
    resumed, whole = run_cached("stopped", **settings), run_cached("whole", **settings)

    steps = max(whole.losses())
    assert evaluated(whole.folder) == evaluated(resumed.folder) == [steps // 2, steps]
    assert steps // 2 > 2


def test_a_stop_at_an_epochs_end_evaluates_it(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    settings = {"eval_split": "val", "num_train_epochs": 2, "effective_batch_size": 8}
    whole = run_cached("whole", **settings)
    half = max(whole.losses()) // 2
    with pytest.raises(StoppedError, match=f"after step {half}"):
        run_cached("stopped", stop_at=half, **settings)

    assert [line["step"] for line in Run(tmp_path / "stopped").lines() if "eval_loss" in line] == [half]


@pytest.mark.parametrize("from_cache", [True, False])
def test_a_stop_while_the_model_is_loaded_begins_no_step(config: PipelineConfig, from_cache: bool) -> None:
    told = Told()
    phases = 2  # images are compared or read, then rows are tokenized
    answers = iter([False, True])  # when data is ready, and when the model is there

    def should_stop() -> bool:
        return told.lines.count("finish") == phases and next(answers)

    with pytest.raises(StoppedError, match="stopped before training"):
        run_training(job_of(config, from_cache=from_cache), told, should_stop)
    assert [line for line in told.lines if line.startswith("start")][-1] == "start tokenizing train"
    assert not (config.output_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("event", "codes"),
    [
        (Event(signalled=(0, 1)), [138, 138]),
        (Event(signalled=(0,)), [138, 130]),
        (Event(signalled=(1,)), [130, 138]),
        (Event(failure="bad data"), [5, 3]),
        (Event(failure="killed"), [5, 9]),
    ],
    ids=["signal to both", "signal to the waiting one", "signal to the slow one", "bad data", "killed"],
)
def test_processes_that_prepare_and_wait_end_together(config: PipelineConfig, event: Event, codes: list[int]) -> None:
    outcome = prepare(job_of(config), event)
    assert outcome.codes == codes, outcome.said
    if event.signalled:
        assert all("stopped before training" in said for said in outcome.said)
    else:
        assert "another process of this run ended while data was prepared" in outcome.said[0]
    assert not (config.output_dir / "metrics.jsonl").exists()
