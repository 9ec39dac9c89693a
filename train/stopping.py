"""When asked to stop: between records while data is prepared, then at the same step in every process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from cache.errors import StoppedError
from cache.progress import Progress


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
    The answer goes over the hosts, not the devices.
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        several = distributed.is_initialized() and distributed.get_world_size() > 1
        self._group = distributed.new_group(backend="gloo") if several else None

    def __call__(self) -> bool:
        asked = self._should_stop()
        if self._group is None:
            return asked
        flag = torch.tensor([asked], dtype=torch.uint8)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)


def stopped_before_training() -> StoppedError:
    """The error for a stop before the first step of this start."""
    return StoppedError("stopped before training went on; nothing was lost", do="run the same command to go on")


def leave_processes() -> None:
    """End the process group, if there is one; all processes must have come to the end of their work."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
