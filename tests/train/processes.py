"""Runs `pipeline` in several processes as torchrun does, but forked from one that has the imports behind it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file


@dataclass(frozen=True)
class Stop:
    """SIGUSR1 to one process once the run has written this many lines of steps."""

    rank: int
    lines: int


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bitsandbytes", "peft", "pipeline.cli", "train.run", "train.trainer", __name__])
    overrides = [f"output_dir={folder}", *settings]
    arguments = ["train", "--config", str(config), "--from-cache", *(part for s in overrides for part in ("--set", s))]
    logs = [folder.with_name(f"{folder.name}-{rank}.log") for rank in range(count)]
    port = _free_port()
    started = [
        context.Process(target=_process, args=(rank, count, port, arguments, folder, stop, logs[rank]))
        for rank in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    codes = [process.exitcode if process.exitcode is not None else -1 for process in started]
    for process in started:
        process.kill()
    return Outcome(codes, folder, [log.read_text() for log in logs])


def _process(
    rank: int, count: int, port: int, arguments: Sequence[str], folder: Path, stop: Stop | None, log: Path
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if stop is not None and stop.rank == rank:
        threading.Thread(target=_signal_later, args=(folder / "metrics.jsonl", stop.lines), daemon=True).start()
    from pipeline.cli import app
    from pipeline.exit import exit_code_of

    sys.exit(exit_code_of(lambda: app(list(arguments), standalone_mode=False)))


def _signal_later(metrics: Path, lines: int) -> None:
    while not (metrics.exists() and metrics.read_text().count('"samples_per_second"') >= lines):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGUSR1)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
