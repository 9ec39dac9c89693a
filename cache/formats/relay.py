"""Reads an entry's bytes by two threads, piece by piece, each piece handed on, in order, by the thread that read it.

Who hands on is who read, so that a checksum goes over a piece while the processor's cache still holds it; and while one
thread does that the other one copies. Both release the interpreter's lock. Where no processor is free for the second
thread, the first one would wait for it: it then reads alone. docs/benchmarks/shard-reading.md has the rates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from threading import Condition, Thread

Part = tuple[memoryview, int]
Read = Callable[[memoryview, int], object]
Arrived = Callable[[memoryview], object]

PIECE_BYTES = 1 << 20  # fits into the cache of one core
WORTH_A_THREAD = 8 << 20  # bytes; starting a thread takes as long as reading one
PATIENCE = 0.5  # share of its time that a reader may wait for the second thread
PAUSE = 16  # entries that are read alone after a longer wait


class Reader:
    """Reads entries, by two threads where that helps. Any number of threads may use it; the counter may then lag."""

    def __init__(self) -> None:
        self._alone = 0  # as many entries more

    def read(self, parts: Sequence[Part], read: Read, arrived: Arrived) -> None:
        """Fill each part's memory from its offset on, and hand all of it on.

        Args:
            parts: byte memory and its place in the file.
            read: fills memory from an offset on; called by two threads at a time.
            arrived: is given every piece once it is filled, in the order of `parts`, one at a time.

        Raises:
            Exception: the first that `read` or `arrived` raised. No thread touches the memory any more then.
        """
        pieces = [
            (memory[start : start + PIECE_BYTES], offset + start)
            for memory, offset in parts
            for start in range(0, memory.nbytes, PIECE_BYTES)
        ]
        small = sum(memory.nbytes for memory, _ in parts) < WORTH_A_THREAD
        if not small and self._alone == 0 and len(os.sched_getaffinity(0)) > 1:
            self._read_by_two(_Relay(pieces, read, arrived))
            return
        self._alone = max(self._alone - 1, 0)
        for memory, offset in pieces:
            read(memory, offset)
            arrived(memory)

    def _read_by_two(self, relay: _Relay) -> None:
        started = time.perf_counter()
        helper = Thread(target=relay.help, name="cache-read")
        helper.start()
        try:
            waited = relay.run()
            joining = time.perf_counter()
            relay.wait_for_helper()
        except BaseException as error:  # an interruption: the other thread must neither wait nor go on
            relay.fail(error)
            relay.wait_for_helper()
            raise
        ended = time.perf_counter()
        helper.join()
        if waited + ended - joining > PATIENCE * (ended - started):
            self._alone = PAUSE
        if relay.error is not None:
            raise relay.error


class _Relay:
    """What the two threads share.

    Attributes:
        error: the first one.
    """

    def __init__(self, pieces: Sequence[Part], read: Read, arrived: Arrived) -> None:
        self._pieces = pieces
        self._read, self._arrived = read, arrived
        self._taken = self._handed_on = 0
        self._changed = Condition()
        self._helper_ended = False
        self.error: BaseException | None = None

    def help(self) -> None:
        """What the second thread does."""
        self.run()
        with self._changed:
            self._helper_ended = True
            self._changed.notify()

    def wait_for_helper(self) -> None:
        """Wait until the second thread touches nothing any more.

        No `join`: after an interrupted one Python takes the thread for ended, which it is not.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._helper_ended)

    def run(self) -> float:
        """Take pieces until none is left or one of the threads has failed; returns the seconds spent waiting."""
        waited = 0.0
        try:
            while (number := self._take()) is not None:
                memory, offset = self._pieces[number]
                self._read(memory, offset)
                came = time.perf_counter()
                if not self._wait_for_turn(number):
                    break
                waited += time.perf_counter() - came
                self._arrived(memory)
                with self._changed:
                    self._handed_on += 1
                    self._changed.notify()
        except BaseException as error:  # also an interruption: the other thread must not wait for this one
            self.fail(error)
        return waited

    def fail(self, error: BaseException) -> None:
        """Let both threads end."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify()

    def _take(self) -> int | None:
        with self._changed:
            number = self._taken
            if number == len(self._pieces) or self.error is not None:
                return None
            self._taken += 1
            return number

    def _wait_for_turn(self, number: int) -> bool:
        """Whether the pieces before have been handed on; False when one of them never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._handed_on == number or self.error is not None)
            return self.error is None
