"""From measured rates and known work to the time of a job, against its limit. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.time_span import NOTHING, Span, each

# Two GPUs gave 1.95 times one (docs/benchmarks/training.md); more were not measured.
EFFICIENCY = Span(0.85, 0.95, 1.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """How long a kind of job takes.

    Attributes:
        constant: seconds of a start, whatever there is to do.
        rates: phase -> seconds a unit.
        processes, device: of the run that was measured.
        source: where the figures come from, for a person.
    """

    constant: Span
    rates: Mapping[str, Span]
    processes: int
    device: str
    source: str


@dataclass(frozen=True, slots=True)
class Piece:
    """One start of a verb, to its end.

    Attributes:
        name: of what it does, for messages.
        measured: None where nothing is known.
        work: phase -> units; of training for the process with most. What the job has done already is not in it.
        spread: relative uncertainty of `tokens`, where not every step was counted.
        processes: that share the work of a step.
        factor: on the rate of `tokens`, e.g. by a calibrated trial.
    """

    name: str
    measured: Measured | None
    work: Mapping[str, float]
    spread: float = 0.0
    processes: int = 1
    factor: float = 1.0

    @property
    def constant(self) -> Span:
        """Of a start."""
        return self.measured.constant if self.measured is not None else NOTHING

    @property
    def unknown(self) -> list[str]:
        """Work whose rate was not measured; it is not in the prediction."""
        if self.measured is None:
            return ["everything"]
        return [name for name, units in self.work.items() if units and name not in self.measured.rates]

    @property
    def total(self) -> Span:
        """Without a time limit."""
        total = self.constant
        for name, units in self.work.items() if self.measured is not None else ():
            rate = self.measured.rates.get(name, NOTHING) if self.measured is not None else NOTHING
            if name == "tokens":
                rate = self._token_rate(rate)
            total += rate.times(units)
        return total

    def _token_rate(self, rate: Span) -> Span:
        rate = rate.times(self.factor).wider(self.spread)
        assert self.measured is not None
        if self.processes == self.measured.processes:
            return rate
        if self.processes == 1:  # measured with several: one has none of their losses, which are not known
            return rate.times(EFFICIENCY.low, EFFICIENCY.likely, EFFICIENCY.high)
        return rate.times(1 / EFFICIENCY.high, 1 / EFFICIENCY.likely, 1 / EFFICIENCY.low)


@dataclass(frozen=True, slots=True)
class TimedJob:
    """A job of the chain.

    Attributes:
        lines: pieces that follow one another; of an array a line is a task.
        limit: seconds.
        lead: how long before its limit it is told to stop; None for one that cannot go on where it was.
        after: names of the jobs before it.
        at_once: how many lines run side by side; None for all.
        most_restarts: after which it is not put back into the queue; None for no bound.
        array: each line has a time limit of its own; else all lines together are one job.
    """

    name: str
    lines: tuple[tuple[Piece, ...], ...]
    limit: float
    lead: float | None = None
    after: tuple[str, ...] = ()
    at_once: int | None = None
    most_restarts: int | None = None
    array: bool = False

    @property
    def totals(self) -> list[Span]:
        """Without a time limit: of each task, or of the one job."""
        lines = [_sum([piece.total for piece in line]) for line in self.lines]
        if self.array:
            return lines
        # In an allocation the longest starts first.
        return [each(lines, lambda times: side_by_side(sorted(times, reverse=True), self.at_once))]

    @property
    def constant(self) -> Span:
        """What each start costs at most."""
        return each([piece.constant for line in self.lines for piece in line], max)

    @property
    def usable(self) -> float:
        """Seconds of a start before it is told to stop."""
        return self.limit - (self.lead or 0.0)

    @property
    def has_figure(self) -> bool:
        """Whether something like each of its pieces was measured; else nothing is known of its time."""
        return all(piece.measured is not None for line in self.lines for piece in line)

    @property
    def unknown(self) -> dict[str, list[str]]:
        """Piece -> work that is not in the prediction."""
        return {piece.name: piece.unknown for line in self.lines for piece in line if piece.unknown}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a job, as far as it is measured: what is not (`job.unknown`) counts nothing.

    Attributes:
        longest: of its longest task, without a time limit.
        wall: from its first start to its end, with all restarts, all tasks; infinite where it never ends.
        restarts: of the longest task, as low, likely and high have it; infinite likewise.
    """

    job: TimedJob
    longest: Span
    wall: Span
    restarts: Span

    @property
    def fits(self) -> bool | None:
        """Also at its longest, within one start; None where that is not known."""
        if not self.job.has_figure:
            return None
        if self.restarts.high:
            return False
        return None if self.job.unknown else True

    @property
    def verdict(self) -> str:
        """For a person."""
        likely, high = self.restarts.likely, self.restarts.high
        if self.fits is None:
            return "unknown"
        if high == 0:
            return "fits"
        if self.job.lead is None:
            return "DOES NOT FIT" if likely else "may not fit"
        if math.isinf(likely):
            return "NEVER ENDS: a start takes longer than its limit"
        if likely == 0:
            return "may need a restart"
        text = f"needs {likely:.0f} restart{'s' if likely > 1 else ''}"
        most = self.job.most_restarts
        return text if most is None or high <= most else f"{text}, slurm.max_requeues ALLOWS {most}"


def restarts(total: float, constant: float, usable: float, *, goes_on: bool) -> float:
    """How often a job has to start again, each time with its constant; infinite where it never ends."""
    if total <= usable:
        return 0.0
    if not goes_on or usable <= constant:
        return math.inf
    return math.ceil((total - constant) / (usable - constant) - 1e-9) - 1.0


def side_by_side(times: Sequence[float], slots: int | None) -> float:
    """When the last one ends if each starts, in this order, as soon as one of so many slots is free."""
    free = [0.0] * min(slots or len(times), len(times))
    for time in times:
        place = free.index(min(free))
        free[place] += time
    return max(free, default=0.0)


def predict(job: TimedJob) -> Prediction:
    """The time of a job."""
    totals = job.totals
    count = each([_restarts(job, total) for total in totals], max)
    walls = [_with_restarts(job, total) for total in totals]
    wall = each(walls, lambda times: side_by_side(times, job.at_once)) if job.array else walls[0]
    return Prediction(job, each(totals, max), wall, count)


def _restarts(job: TimedJob, total: Span) -> Span:
    goes_on, constant = job.lead is not None, job.constant
    return Span(
        restarts(total.low, constant.low, job.usable, goes_on=goes_on),
        restarts(total.likely, constant.likely, job.usable, goes_on=goes_on),
        restarts(total.high, constant.high, job.usable, goes_on=goes_on),
    )


def _with_restarts(job: TimedJob, total: Span) -> Span:
    count, constant = _restarts(job, total), job.constant
    return total + Span(
        _product(count.low, constant.low), _product(count.likely, constant.likely), _product(count.high, constant.high)
    )


def _product(count: float, seconds: float) -> float:
    return count * seconds if count and seconds else (math.inf if math.isinf(count) else 0.0)


def _sum(spans: Sequence[Span]) -> Span:
    return sum(spans, NOTHING)
