"""Lines of work inside one allocation: the longest first onto the next free slot, the steps of a line in order."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache.errors import PipelineError, StoppedError
from cache.processes import Child, end, ending, error_of, last_lines, start
from pipeline.exit import StopRequest

logger = logging.getLogger("pipeline")

POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Step:
    """A process of a line.

    Attributes:
        name: for messages.
        child: what to run; its environment is that of the slot that it gets, given the slot's name.
        is_done: asked just before it would start; then it does not.
    """

    name: str
    child: Callable[[str], Child]
    is_done: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Line:
    """Steps that follow one another on one slot.

    Attributes:
        name: for messages.
        size: how long it takes, in any unit; the largest starts first.
    """

    name: str
    steps: tuple[Step, ...]
    size: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A step that failed; the steps behind it were not started."""

    line: str
    step: str
    code: int
    child: Child


@dataclass(slots=True)
class _Running:
    line: Line
    slot: str
    left: list[Step]
    step: Step
    child: Child
    process: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)


def run_lines(lines: Sequence[Line], slots: Sequence[str], stop: StopRequest) -> list[Failure]:
    """Run all lines, one at a time on each slot. One that fails does not stop the others.

    Args:
        slots: their names, no two alike unless empty.
        stop: a signal that it received is handed to the children; they are waited for and nothing more is started.

    Returns:
        What failed.

    Raises:
        StoppedError: `stop` said so, and all children have ended.
    """
    waiting = sorted(lines, key=lambda line: -line.size)
    free = list(slots)
    running: list[_Running] = []
    failures: list[Failure] = []
    asked = False
    try:
        while running or (waiting and not stop()):
            while free and waiting and not stop():
                line, slot = waiting.pop(0), free.pop(0)
                _go_on(line, slot, list(line.steps), running, free)
            if stop() and not asked:
                asked = True
                for one in running:
                    one.process.send_signal(stop.received or 15)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                if _ended(one, failures, stop):
                    _go_on(one.line, one.slot, one.left, running, free)
                else:
                    free.append(one.slot)
            time.sleep(POLL_SECONDS)
    finally:
        end([one.process for one in running])
    if stop():
        told = "".join(f"\n  {describe(failure)}" for failure in failures)
        raise StoppedError(f"stopped; what is finished is kept{told}", do="run the same command to go on")
    return failures


def failure_of(failures: Sequence[Failure], count: int) -> PipelineError:
    """The error that tells of all failures; its exit code is the first one's."""
    told = "".join(f"\n  {describe(failure)}" for failure in failures)
    return error_of(failures[0].code)(
        f"{len(failures)} of {count} experiments failed:{told}",
        do="mend that, then run the same command again: it takes up only what is missing",
    )


def describe(failure: Failure) -> str:
    """What failed, how, and the end of its log."""
    lines = "".join(f"\n      {line}" for line in last_lines(failure.child.log))
    return f"{failure.step} ({ending(failure.code)}); the end of {failure.child.log}:{lines}"


def _go_on(line: Line, slot: str, left: list[Step], running: list[_Running], free: list[str]) -> None:
    """Start the line's next step that is not done; without one the slot is free again."""
    while left:
        step = left.pop(0)
        if step.is_done():
            logger.info("%s: done already", step.name)
            continue
        child = step.child(slot)
        running.append(_Running(line, slot, left, step, child, start(child, append=True)))
        logger.info("%s: started%s, log in %s", step.name, f" on GPU {slot}" if slot else "", child.log)
        return
    free.append(slot)


def _ended(one: _Running, failures: list[Failure], stop: StopRequest) -> bool:
    """Note how a step ended; whether its line goes on."""
    code = one.process.returncode
    spent = time.monotonic() - one.since
    if stop() and (code == stop.exit_code or -code == stop.received):
        logger.info("%s: stopped", one.step.name)
        return False
    logger.info("%s: %s after %.0f s", one.step.name, ending(code) if code else "done", spent)
    if code:
        failures.append(Failure(one.line.name, one.step.name, code, one.child))
    return code == 0 and not stop()
