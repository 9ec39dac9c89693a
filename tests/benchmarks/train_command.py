"""`pipeline train` as a benchmark needs it: from its first step, with the figures of this run and no other."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cli import app
from pipeline.exit import StopRequest, exit_code_of
from train.run_folder import METRICS_FILE


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
