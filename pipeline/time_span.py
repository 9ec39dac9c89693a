"""A predicted time with its uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds: what is expected, and between what."""

    low: float
    likely: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.likely + other.likely, self.high + other.high)

    def times(self, low: float, likely: float | None = None, high: float | None = None) -> Span:
        """Each of the three multiplied; by one number where only one is given."""
        likely = low if likely is None else likely
        return Span(self.low * low, self.likely * likely, self.high * (likely if high is None else high))

    def wider(self, share: float) -> Span:
        """Low and high further from what is expected by this share of it."""
        return Span(max(0.0, self.low - share * self.likely), self.likely, self.high + share * self.likely)

    def describe(self) -> str:
        """`2 h 10 min (1 h 55 min - 2 h 30 min)`."""
        return f"{duration(self.likely)} ({duration(self.low)} - {duration(self.high)})"

    def figures(self) -> dict[str, float]:
        """For a JSON file."""
        return {"low": round(self.low, 2), "likely": round(self.likely, 2), "high": round(self.high, 2)}


NOTHING = Span(0.0, 0.0, 0.0)


def each(spans: Iterable[Span], combine: Callable[[list[float]], float]) -> Span:
    """Combine the lows, the likelies and the highs, e.g. by `max`."""
    every = list(spans)
    return Span(combine([s.low for s in every]), combine([s.likely for s in every]), combine([s.high for s in every]))


def duration(seconds: float) -> str:
    """`8.1 s`, `3 min 20 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {small}"
    return f"{whole} s"
