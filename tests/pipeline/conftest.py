"""Runs a verb as the console script does, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pipeline.cli import app
from pipeline.exit import StopRequest, exit_code_of, stop_request


@dataclass(frozen=True)
class Result:
    """How a verb ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    """`run("cache", "--split", "train", ...)` -> exit code, stdout, stderr."""
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}

    def call(*args: object) -> Result:
        capsys.readouterr()
        code = exit_code_of(lambda: app([str(arg) for arg in args], standalone_mode=False, prog_name="pipeline"))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield call
    stop_request.received = None
    for number, handler in handlers.items():
        signal.signal(number, handler)
