"""Work that goes on behind the caller's back, in a thread, with a bound on how much may wait for it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


HANDOVER = 0.0005  # seconds


@contextlib.contextmanager
def quick_handovers() -> Iterator[None]:
    """A thread that waits for the interpreter has it ten times sooner than by default (5 ms).

    The threads here need it for moments, many times an item, between calls that let go of it; the one that drives a GPU
    needs it for long stretches.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(HANDOVER)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class Stage(Generic[T]):
    """One thread that does `work(item)` for one item after another, in the order in which they come.

    After an error in `work` nothing more is done: what waits and what still comes is dropped. The error is raised in
    the calling thread, once, at its next call.

    Args:
        name: of the thread.
        work: what is done with an item. It should let go of the interpreter's lock (large copies, hashing, input and
            output and waiting for a device do).
        limit: how much may be unfinished at a time, the item in work included. An item that is larger than that is
            taken when there is no other.

    Attributes:
        waited: seconds that callers of `put` waited for room.
    """

    def __init__(self, name: str, work: Callable[[T], None], *, limit: int) -> None:
        self._name, self._work, self._limit = name, work, limit
        self._waiting: deque[tuple[T, int]] = deque()
        self._unfinished = 0
        self._error: BaseException | None = None
        self._told = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.waited = 0.0

    def put(self, item: T, weight: int = 1) -> None:
        """Hand an item over; waits as long as too much is unfinished.

        Args:
            weight: what the item counts against the limit.

        Raises:
            BaseException: what `work` raised before.
            RuntimeError: the thread cannot be started.
        """
        with self._changed:
            started = time.perf_counter()
            self._changed.wait_for(lambda: self._error or not self._unfinished or self._fits(weight))
            self.waited += time.perf_counter() - started
            self._raise_error()
            if self._error is not None:
                return
            if self._thread is None:
                # A daemon, so that a process that ends without closing the stage does end.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()  # may fail; then nothing counts as unfinished that nobody would ever finish
                self._thread = thread
            self._unfinished += weight
            self._waiting.append((item, weight))
            self._changed.notify_all()

    @property
    def unfinished(self) -> int:
        """The weight of all that is not done yet."""
        return self._unfinished

    def check(self) -> None:
        """Raise what `work` raised, unless it was raised already."""
        with self._changed:
            self._raise_error()

    def drain(self) -> None:
        """Wait until everything is done.

        Raises:
            BaseException: what `work` raised, unless it was raised already.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
            self._raise_error()

    def close(self) -> None:
        """Wait until everything is done, and end the thread. Raises nothing; the stage takes nothing any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _fits(self, weight: int) -> bool:
        return self._unfinished + weight <= self._limit

    def _raise_error(self) -> None:
        if self._error is not None and not self._told:
            self._told = True
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                item, weight = self._waiting.popleft()
            if self._error is None:
                try:
                    self._work(item)
                except BaseException as error:
                    self._error = error
            del item
            with self._changed:
                self._unfinished -= weight
                self._changed.notify_all()
