"""What the caching stages waited for: where several overlap, the one that all others wait for sets the rate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

IMAGES, TOWER, DISK = "images", "tower", "disk"


class Waits:
    """Seconds that were waited, by what for. Each name belongs to one thread at a time."""

    def __init__(self, *names: str) -> None:
        self.seconds = dict.fromkeys(names, 0.0)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Time spent inside counts."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The same items; the time until each of them is there counts."""
        waiting = iter(items)
        while True:
            with self.on(name):
                item = next(waiting, None)
            if item is None:
                return
            yield item
