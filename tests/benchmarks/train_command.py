"""`pipeline train` as a benchmark needs it: from its first step, with the figures of this run and no other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cli import ALLOCATOR, app
from pipeline.exit import StopRequest, exit_code_of
from train.run_folder import METRICS_FILE


def take_its_allocator() -> None:
    """Begin this program anew with the command line's settings of the allocator: torch reads them at its import."""
    if not ALLOCATOR.keys() <= os.environ.keys():
        os.environ.update(ALLOCATOR)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def train_anew(train: Callable[[], None], output: Path) -> list[dict[str, Any]]:
    """The logged steps of a run that `train` makes in `output`. What an earlier run left there is removed first: a
    finished run trains nothing when it is started again, and its figures would pass for new ones."""
    shutil.rmtree(output, ignore_errors=True)
    train()
    lines = [json.loads(line) for line in (output / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "samples_per_second" in line]


def pipeline(*arguments: str) -> None:
    """A verb of the command line in this process.

    Raises:
        SystemExit: with its exit code, if that is not 0.
    """
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    try:
        code = exit_code_of(lambda: app(list(arguments), standalone_mode=False))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # the verb's own asks it to stop, and nothing else listens to that
    if code:
        raise SystemExit(code)
