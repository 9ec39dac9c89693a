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
    assert told.lines == ["start tokenizing train", *5 * ["advance"], "finish"]
    run_training(job_of(config), Silent())
    assert list(Run(config.output_dir).losses()) == [1, 2]


@pytest.mark.parametrize("from_cache", [True, False])
def test_a_stop_while_the_model_is_loaded_begins_no_step(config: PipelineConfig, from_cache: bool) -> None:
    told = Told()
    phases = 1 if from_cache else 2
    answers = iter([False, True])  # when data is ready, and when the model is there

    def should_stop() -> bool:
        return told.lines.count("finish") == phases and next(answers)

    with pytest.raises(StoppedError, match="stopped before training"):
        run_training(job_of(config, from_cache=from_cache), told, should_stop)
    assert [line for line in told.lines if line.startswith("start")][-1] == "start tokenizing train"
    assert not (config.output_dir / "metrics.jsonl").exists()


# What the two processes do when asked to prepare: process 1 takes its time, process 0 is soon through.
PREPARING = """
import os, sys, time
from datetime import timedelta
from torch import distributed
from cache.errors import DataError
from cache.progress import Silent
from pipeline.exit import exit_code_of, stop_request
from train.stopping import AskedOfAny, leave_processes

rank, folder, what = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]


def work(progress):
    open(f"{folder}/{rank}.began", "w").close()
    progress.start("tokenizing", 600, "records")
    for _ in range(600 if rank else 0):
        time.sleep(0.1)
        progress.advance()
        if what == "fail":
            raise DataError("a bad record", do="mend it")
    progress.finish()
    if what == "killed" and rank == 0:
        os._exit(9)


def prepare():
    AskedOfAny(stop_request).prepare(work, Silent())


stop_request.install()
distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
code = exit_code_of(prepare)
leave_processes()
sys.exit(code)
"""
