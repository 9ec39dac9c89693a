"""Several processes of this program at once, e.g. one per GPU: waited for, stopped together, named when they fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cache.errors import CacheError, ConfigError, DataError, PipelineError, ResourceError, StoppedError

_BY_EXIT_CODE = {kind.exit_code: kind for kind in (ConfigError, DataError, CacheError, ResourceError)}
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 20.0
_LIBC = ctypes.CDLL(None)  # looked up before a fork
_IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Child:
    """A process for one part.

    Attributes:
        name: for messages.
        command: program and arguments.
        environment: the whole environment.
        log: where its output goes.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    log: Path


def run_children(children: Sequence[Child], should_stop: Callable[[], bool]) -> None:
    """Run all at once and wait for all; one that fails leaves the others alone. They never wait for each other.

    Raises:
        PipelineError: a child failed; named, with the end of its log, as the error that its exit code stands for.
        StoppedError: `should_stop` said so; the children were asked to stop (SIGTERM) and have ended, not all of them
            with their work done.
    """
    running: list[subprocess.Popen[bytes]] = []
    try:
        for child in children:
            running.append(start(child))
        stopping = _wait(running, should_stop)
    finally:
        end(running)
    failed = [(child, p.returncode) for child, p in zip(children, running, strict=True) if p.returncode]
    if not failed:
        return
    if stopping and all(code in (143, -15) for _, code in failed):
        raise StoppedError("stopped; everything encoded so far is kept", do="run the same command to go on")
    raise _failure(failed, len(children))


def start(child: Child, *, append: bool = False) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to its log, behind what is there already if `append`.

    It is asked to stop (SIGTERM) when the calling thread ends, however that happens: after a SIGKILL the next run would
    else meet it at work on the same GPU. Linux alone can do that.
    """
    parent = os.getpid()

    def stop_with_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before that
            os._exit(128 + signal.SIGTERM)

    child.log.parent.mkdir(parents=True, exist_ok=True)
    with child.log.open("ab" if append else "wb") as log:
        # A session of its own: what a terminal or a scheduler sends to the group reaches the child through the parent
        # only, once.
        return subprocess.Popen(  # noqa: S603  (our own program)
            child.command,
            env=child.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=stop_with_parent if _IS_LINUX else None,  # noqa: PLW1509  (it takes no lock)
        )


def _wait(running: Sequence[subprocess.Popen[bytes]], should_stop: Callable[[], bool]) -> bool:
    """Until all have ended; returns whether they were asked to."""
    asked = False
    while any(process.poll() is None for process in running):
        if should_stop() and not asked:
            asked = True
            for process in running:
                process.terminate()
        time.sleep(_POLL_SECONDS)
    return asked


def end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Leave no child behind when waiting was cut short."""
    left = [process for process in running if process.poll() is None]
    for process in left:
        process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in left:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _failure(failed: Sequence[tuple[Child, int]], count: int) -> PipelineError:
    child, code = failed[0]
    names = ", ".join(f"{one.name} ({ending(code)})" for one, code in failed)
    return error_of(code)(
        f"{len(failed)} of {count} processes failed: {names}. What the first said:\n    "
        + "\n    ".join(last_lines(child.log)),
        where=str(child.log),
        do="mend that, then run the same command again: what the processes have committed is kept",
    )


def last_lines(log: Path, count: int = 6) -> list[str]:
    """The end of a log; of a progress bar that redraws itself only what it showed last."""
    return log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").strip().splitlines()[-count:]


def error_of(code: int) -> type[PipelineError]:
    """The error that an exit code of this program stands for."""
    return ResourceError if code == -9 else _BY_EXIT_CODE.get(code, PipelineError)


def ending(code: int) -> str:
    """How a process ended, for a person."""
    if code == -9:
        return "killed, most often because memory ran out"
    return f"signal {-code}" if code < 0 else f"exit code {code}"
