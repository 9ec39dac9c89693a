"""Runs `pipeline` in several processes as torchrun does, but forked from one that has the imports behind it."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from cache.errors import DataError
from cache.progress import Silent
from tests.ports import free_ports
from train.job import Job

WAIT_SECONDS = 400


@dataclass(frozen=True)
class Stop:
    """SIGUSR1 to one process once the run has written this many lines of steps."""

    rank: int
    lines: int


@dataclass(frozen=True)
class Event:
    """What happens while process 1 of two prepares its data and process 0, which is through, waits for it.

    signalled: these get SIGUSR1.
    failure: how process 1 ends by itself.
    """

    signalled: tuple[int, ...] = ()
    failure: Literal["bad data", "killed"] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the processes came to."""

    codes: list[int]
    folder: Path
    said: list[str]

    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "samples_per_second" in line}

    def evaluations(self) -> list[tuple[int, float, float]]:
        """Step, loss and token F1 of each evaluation."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["eval_loss"], line["eval_token_f1"]) for line in lines if "eval_loss" in line]

    def adapter(self) -> dict[str, torch.Tensor]:
        """The saved adapter's tensors."""
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")


def train(config: Path, folder: Path, count: int, *settings: str, stop: Stop | None = None) -> Outcome:
    """`pipeline train --from-cache` into a run folder, in `count` processes over gloo."""
    overrides = [f"output_dir={folder}", *settings]
    arguments = ["train", "--config", str(config), "--from-cache", *(part for s in overrides for part in ("--set", s))]
    return _run(folder, count, _train, arguments, folder, stop)


def prepare(job: Job, event: Event) -> Outcome:
    """A training from the cache in two processes, of which process 1 prepares longer than is waited for it."""
    return _run(job.output_dir, 2, _prepare, job, event)


def _run(folder: Path, count: int, work: Callable[..., int], *arguments: Any) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bitsandbytes", "peft", "pipeline.cli", "train.run", "train.trainer", __name__])
    logs = [folder.with_name(f"{folder.name}-{rank}.log") for rank in range(count)]
    (port,) = free_ports(1)
    started = [
        context.Process(target=_process, args=(rank, count, port, logs[rank], work, arguments)) for rank in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(WAIT_SECONDS)
    codes = [process.exitcode if process.exitcode is not None else -1 for process in started]
    for process in started:
        process.kill()
    return Outcome(codes, folder, [log.read_text() for log in logs])


def _process(rank: int, count: int, port: int, log: Path, work: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(WAIT_SECONDS - 20)  # where a process hangs is found in its log
    torch.set_num_threads(1)
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from pipeline.exit import leave

    leave(work(rank, *arguments))


def _train(rank: int, arguments: Sequence[str], folder: Path, stop: Stop | None) -> int:
    if stop is not None and stop.rank == rank:
        threading.Thread(target=_signal_later, args=(folder / "metrics.jsonl", stop.lines), daemon=True).start()
    from pipeline.cli import app
    from pipeline.exit import exit_code_of

    return exit_code_of(lambda: app(list(arguments), standalone_mode=False))


def _prepare(rank: int, job: Job, event: Event) -> int:
    from pipeline.exit import exit_code_of, stop_request
    from train.run import run_training

    stop_request.install()
    signs = _Signs(job.output_dir)

    def should_stop() -> bool:
        if stop_request():
            signs.put(f"asked{rank}")
        return stop_request()

    progress = _SlowIn1(rank, signs, event)
    return exit_code_of(lambda: run_training(job, progress, should_stop) and None)


class _Signs:
    """What processes tell each other without the group that is tried."""

    def __init__(self, beside: Path) -> None:
        self._beside = beside

    def put(self, name: str) -> None:
        self._file(name).touch()

    def await_(self, *names: str) -> None:
        while not all(self._file(name).exists() for name in names):
            time.sleep(0.01)

    def _file(self, name: str) -> Path:
        return self._beside.with_name(f"{self._beside.name}-{name}")


class _SlowIn1(Silent):
    """Slow in process 1; the event comes a second after process 0 is through.

    Signals come one after the other, each when the one before was heard, and process 1 goes on after the last: else
    the first of them could end both processes before the second is there, and their exit codes would be chance.
    """

    def __init__(self, rank: int, signs: _Signs, event: Event) -> None:
        self._rank, self._signs, self._event = rank, signs, event
        if rank in event.signalled:
            threading.Thread(target=self._signal, daemon=True).start()

    def start(self, what: str, total: int, unit: str) -> None:
        if self._rank == 0:
            self._signs.put("through")

    def advance(self, count: int = 1) -> None:
        if self._rank == 1:
            self._wait()
            self._signs.await_(*self._heard(self._event.signalled))
            if self._event.failure is not None:
                self._fail()

    def _fail(self) -> None:
        if self._event.failure == "bad data":
            raise DataError("a record is bad", do="mend it")
        os._exit(9)

    def _wait(self) -> None:
        self._signs.await_("through")
        time.sleep(1.0)

    def _signal(self) -> None:
        self._wait()
        self._signs.await_(*self._heard(rank for rank in self._event.signalled if rank < self._rank))
        os.kill(os.getpid(), signal.SIGUSR1)

    @staticmethod
    def _heard(ranks: Iterable[int]) -> list[str]:
        return [f"asked{rank}" for rank in ranks]


def _signal_later(metrics: Path, lines: int) -> None:
    while not (metrics.exists() and metrics.read_text().count('"samples_per_second"') >= lines):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)
