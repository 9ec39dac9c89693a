"""When asked to stop: all processes end together, between records while data is prepared, then at the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import distributed

from cache.errors import PipelineError, ResourceError, StoppedError
from cache.progress import Progress

T = TypeVar("T")
ROUND_SECONDS = 0.5
FAREWELL_SECONDS = 5.0  # the others answer within a round, unless they are gone
_left: list[object] = []


class StoppableProgress:
    """Ends the work that reports to it when asked to; for work that may end anywhere."""

    def __init__(self, progress: Progress, should_stop: Callable[[], bool]) -> None:
        self._progress, self._should_stop = progress, should_stop

    def start(self, what: str, total: int, unit: str) -> None:
        """See Progress. Raises StoppedError when asked to stop."""
        self._check()
        self._progress.start(what, total, unit)

    def advance(self, count: int = 1) -> None:
        """See Progress. Raises StoppedError when asked to stop."""
        self._check()
        self._progress.advance(count)

    def finish(self) -> None:
        """See Progress. Raises StoppedError when asked to stop."""
        self._progress.finish()
        self._check()

    def _check(self) -> None:
        if self._should_stop():
            self._progress.finish()
            raise stopped_before_training()


class AskedOfAny:
    """Callable: whether any process was asked to stop. All processes call it equally often and get the same answers.

    A signal reaches the processes at different moments; one that stopped alone would leave the others waiting for it.
    The answer goes over the hosts, not the devices. All processes must make it at about the same time: nothing hears a
    signal while it waits for the others here.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        several = distributed.is_initialized() and distributed.get_world_size() > 1
        self._group = distributed.new_group(backend="gloo") if several else None

    def __call__(self) -> bool:
        return bool(self._of_any([self._should_stop()])[0])

    def prepare(self, work: Callable[[Progress], T], progress: Progress) -> T:
        """Do what each process does for itself, and wait until all are done; it may end wherever it reports progress.

        Args:
            work: called with a Progress that ends it.

        Raises:
            StoppedError: in all processes, when any was asked to stop.
            ResourceError: another process failed, or is gone.
        """
        if self._group is None:
            return work(StoppableProgress(progress, self._should_stop))
        rounds = _Rounds(self._should_stop, self._of_any)
        rounds.start()
        try:
            done = work(StoppableProgress(progress, rounds.must_end))
            rounds.through.set()
            rounds.join()
        except StoppedError:
            raise rounds.error() from None
        except BaseException:
            rounds.tell_failure()
            raise
        if rounds.must_end():
            raise rounds.error()
        return done

    def _of_any(self, flags: list[bool]) -> list[bool]:
        if self._group is None:
            return flags
        together = torch.tensor(flags, dtype=torch.uint8)
        distributed.all_reduce(together, op=distributed.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in together.tolist()]


class _Rounds(threading.Thread):
    """Tells the other processes, and hears from them, how preparation goes, until all are through or all must end.

    A thread, so that a process that prepares hears of the others, and one that waits for them hears signals.
    """

    def __init__(self, should_stop: Callable[[], bool], of_any: Callable[[list[bool]], list[bool]]) -> None:
        super().__init__(name="preparation", daemon=True)
        self._should_stop, self._of_any = should_stop, of_any
        self.through = threading.Event()
        self._failed_here = self._failed = self._asked = False
        self._lost: Exception | None = None

    def run(self) -> None:
        """Go on until all processes are through, one was asked to stop, or one failed."""
        busy = True
        while busy and not self.must_end():
            self.through.wait(ROUND_SECONDS)
            # In this order: who failed is through as well.
            own = [self._should_stop(), not self.through.is_set(), self._failed_here]
            try:
                asked, busy, self._failed = self._of_any(own)
            except Exception as error:  # kept for the thread that the work is done in
                self._lost = error
            else:
                self._asked = asked

    def must_end(self) -> bool:
        """Whether preparation is to end in all processes."""
        return self._asked or self._failed or self._lost is not None

    def tell_failure(self) -> None:
        """Let the others know that this process ends; they would wait for it."""
        self._failed_here = True
        self.through.set()
        self.join(FAREWELL_SECONDS)

    def error(self) -> PipelineError:
        """Why preparation must end."""
        if self._failed or self._lost is not None:
            reason = "" if self._lost is None else f": {self._lost}"
            return ResourceError(
                f"another process of this run ended while data was prepared{reason}",
                do="see what the other processes say, the first that ended above all; then run the same command again",
            )
        return stopped_before_training()


def stopped_before_training() -> StoppedError:
    """The error for a stop before the first step of this start."""
    return StoppedError("stopped before training went on; nothing was lost", do="run the same command to go on")


def leave_processes() -> None:
    """End the process group, if there is one; all processes must have come to the end of their work.

    The group object itself stays: DDP's reducer, taken down under the interpreter's lock, would otherwise hold the last
    reference, and gloo's destructor joins threads that may wait for that lock to let go of a tensor.
    """
    if distributed.is_initialized():
        _left.append(distributed.group.WORLD)
        distributed.destroy_process_group()
