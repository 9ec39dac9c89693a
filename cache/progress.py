"""How long work reports itself without printing: the command line passes something that draws a bar."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A bar for one phase after another."""

    def start(self, what: str, total: int, unit: str) -> None:
        """Begin a phase of `total` units."""

    def advance(self, count: int = 1) -> None:
        """Some units are done."""

    def finish(self) -> None:
        """The phase is over."""


class Silent:
    """Reports nothing."""

    def start(self, what: str, total: int, unit: str) -> None:
        """See Progress."""

    def advance(self, count: int = 1) -> None:
        """See Progress."""

    def finish(self) -> None:
        """See Progress."""
