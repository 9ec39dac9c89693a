"""Progress bars of the command line: rate and time left, on a terminal and in a log file."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Bar:
    """A tqdm bar for one phase after another; in a log file it writes a line every half minute at most."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        # A bar that is still drawn would stand on one line with the error's message.
        self.finish()

    def start(self, what: str, total: int, unit: str) -> None:
        """See cache.progress.Progress."""
        self.finish()
        interval = 0.1 if sys.stderr.isatty() else 30.0
        self._bar = tqdm(total=total, desc=what, unit=unit, mininterval=interval, dynamic_ncols=True, file=sys.stderr)

    def advance(self, count: int = 1) -> None:
        """See cache.progress.Progress."""
        if self._bar is not None:
            self._bar.update(count)

    def finish(self) -> None:
        """See cache.progress.Progress."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
