"""Rates and time left by a clock that the test moves: the first step warms up and says nothing about the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import TrainerState

from train.callbacks import TELLING, LogLines
from train.throughput import Throughput


@dataclass
class _Pack:
    input_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 50))


@dataclass
class _Step:
    """What is read of a step."""

    num_samples: int = 4
    num_image_tokens: int = 20
    packs: tuple[_Pack, ...] = (_Pack(), _Pack())


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock."""
    now = [1000.0]
    monkeypatch.setattr("train.throughput.time.perf_counter", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def _do(rates: Throughput, wait: Callable[[float], None], *seconds: float) -> None:
    for one in seconds:
        wait(one)
        rates.count(_Step())  # type: ignore[arg-type]


def test_a_first_step_by_itself_gives_no_time_left(wait: Callable[[float], None]) -> None:
    rates = Throughput(torch.device("cpu"))

    _do(rates, wait, 600)
    first = rates.report(1000)
    _do(rates, wait, 2)
    second = rates.report(999)

    assert "seconds_left" not in first
    assert (first["seconds"], first["samples_per_second"]) == (600, 0.007)
    assert (second["seconds"], second["samples_per_second"], second["seconds_left"]) == (2, 2, 2 * 999)


def test_a_first_interval_of_several_steps_is_rated_without_the_first(wait: Callable[[float], None]) -> None:
    rates = Throughput(torch.device("cpu"))

    with rates.waiting():
        wait(100)
    _do(rates, wait, 500, 2, 2, 2)
    wait(2)  # what the device still had to do
    line = rates.report(100)

    assert line["seconds"] == 8
    assert line["samples_per_second"] == 12 / 8
    assert line["tokens_per_second"] == 300 / 8
    assert line["image_tokens_per_second"] == 60 / 8
    assert line["data_wait_share"] == 0
    assert line["seconds_left"] == round(8 / 3 * 100, 1)


def test_an_evaluation_or_a_checkpoint_behind_the_first_step_counts_as_neither(wait: Callable[[float], None]) -> None:
    evaluated, saved = Throughput(torch.device("cpu")), Throughput(torch.device("cpu"))

    _do(evaluated, wait, 600)
    wait(50)
    evaluated.pause()
    _do(evaluated, wait, 3)
    assert evaluated.report(10)["seconds_left"] == 30

    saved.pause()
    _do(saved, wait, 600)
    wait(50)
    saved.leave_out(50)
    _do(saved, wait, 3)
    assert saved.report(10)["seconds_left"] == 30


def test_a_slow_second_step_is_soon_outweighed(wait: Callable[[float], None]) -> None:
    rates = Throughput(torch.device("cpu"))
    lines = []
    for number, seconds in enumerate([600, 60, *[1] * 29]):
        _do(rates, wait, seconds)
        lines.append(rates.report(30 - number))

    assert lines[1]["seconds_left"] == 60 * 29
    assert lines[10]["seconds_left"] < 8 * 20
    assert lines[-1]["seconds_left"] == 0


class _Memory:
    """A GPU's, played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.retries = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 << 30)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": self.retries})


def test_retries_of_the_allocator_are_those_since_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _Memory(monkeypatch)
    memory.retries = 7  # of a calibration
    rates = Throughput(torch.device("cuda"))

    memory.retries = 9
    assert (rates.report(1)["alloc_retries"], rates.report(1).get("alloc_retries")) == (2, None)
    memory.retries = 10
    line = rates.report(1)
    assert (line["alloc_retries"], line["peak_memory_gib"]) == (1, 3)


def test_memory_that_is_full_again_and_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLines()
    state = TrainerState(max_steps=20)
    figures = ("loss", "learning_rate", "grad_norm", "samples_per_second", "image_tokens_per_second")
    rates = dict.fromkeys((*figures, "data_wait_share", "peak_memory_gib"), 1.0)
    with caplog.at_level(logging.WARNING, "train"):
        for number in range(20):
            full = {"alloc_retries": 1.0} if number % 2 else {}
            lines.on_log(None, state, None, rates | full)  # type: ignore[arg-type]
            assert len(caplog.records) == (number >= 2 * TELLING - 1)
    assert "lower train.tokens_per_pack, or set train.gradient_checkpointing: true" in caplog.text
