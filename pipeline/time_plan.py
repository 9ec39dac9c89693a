"""The times of all jobs of a chain and of the whole, against limits. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.printed_commands import runnable
from pipeline.time_job import Prediction, TimedJob, predict
from pipeline.time_span import NOTHING, Span, duration, each


def how_to_measure() -> str:
    """What to do where there is no figure."""
    return runnable("run `pipeline plan --calibrate` in a job on the same kind of GPU as the jobs will have")


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The whole chain, in the order of submission.

    Attributes:
        jobs: those that are not finished.
        limit: seconds that the whole may take; None where nobody said.
        notes: what was assumed, or is missing.
    """

    jobs: tuple[TimedJob, ...]
    limit: float | None = None
    notes: tuple[str, ...] = ()
    _predictions: dict[str, Prediction] = field(default_factory=dict, repr=False, compare=False)

    def of(self, name: str) -> Prediction:
        """The prediction of a job."""
        if name not in self._predictions:
            self._predictions[name] = predict(next(job for job in self.jobs if job.name == name))
        return self._predictions[name]

    @property
    def without_figure(self) -> list[str]:
        """Names of the jobs whose time is not known."""
        return [job.name for job in self.jobs if not job.has_figure]

    @property
    def whole(self) -> Span | None:
        """Each job starts as soon as all before it have ended; waiting in the queue is not in it.

        None where a job has no figure.
        """
        return None if self.without_figure else self._measured

    @property
    def _measured(self) -> Span:
        """The whole, where jobs without a figure take no time."""
        ends: dict[str, Span] = {}
        for job in self.jobs:
            before = [ends[name] for name in job.after if name in ends]
            ends[job.name] = (each(before, max) if before else NOTHING) + self.of(job.name).wall
        return each(ends.values(), max) if ends else NOTHING

    @property
    def known(self) -> bool:
        """Whether there is a figure for everything."""
        return not any(job.unknown for job in self.jobs)

    @property
    def whole_fits(self) -> bool | None:
        """Whether the whole ends within its limit, also at its longest; None where that is not known."""
        if self.limit is not None and self._measured.high > self.limit:
            return False
        return True if self.known else None

    @property
    def fits(self) -> bool | None:
        """Whether all jobs and the whole do; None where that is not known."""
        if self.misfits or self.whole_fits is False:
            return False
        return True if self.known else None

    @property
    def misfits(self) -> list[str]:
        """Names of the jobs that may not end within their limit."""
        return [job.name for job in self.jobs if self.of(job.name).fits is False]

    def with_jobs(self, changed: Mapping[str, TimedJob]) -> TimePlan:
        """The chain with some of its jobs exchanged."""
        return TimePlan(tuple(changed.get(job.name, job) for job in self.jobs), self.limit, self.notes)

    def figures(self) -> dict[str, Any]:
        """Everything, for a JSON file. Seconds; null for what never ends and for what is not known."""
        jobs = {}
        for job in self.jobs:
            found = self.of(job.name)
            jobs[job.name] = {
                "tasks": len(job.lines) if job.array else None,
                "seconds": found.longest.figures() if job.has_figure else None,
                "wall_seconds": finite(found.wall.figures()) if job.has_figure else None,
                "restarts": finite(found.restarts.figures()) if job.has_figure else None,
                "time_limit": job.limit,
                "fits": found.fits,
                "verdict": found.verdict,
                "after": list(job.after),
                "not_in_it": job.unknown,
                "measured_in": sources_of(job),
            }
        seconds = finite(self.whole.figures()) if self.whole is not None else None
        whole = {"seconds": seconds, "limit": self.limit, "fits": self.whole_fits}
        return {"jobs": jobs, "whole": whole, "fits": self.fits, "notes": list(self.notes)}

    def describe(self) -> str:
        """The same in lines for a person."""
        head = ("job", "tasks", "predicted (low - high)", "limit", "")
        rows = [head, *(self._row(job) for job in self.jobs)]
        widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", f"the whole: {self._whole_line()}"]
        missing = {name: what for job in self.jobs for name, what in job.unknown.items()}
        lines += [f"  not in it, as nothing is measured: {', '.join(what)} of {name}" for name, what in missing.items()]
        found = dict.fromkeys(source for job in self.jobs for source in sources_of(job))
        lines += ["measured:", *(f"  - {source}" for source in found)] if found else []
        lines += ["assumed:", *(f"  - {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)

    def _whole_line(self) -> str:
        verdict = ""
        if self.limit is not None:
            words = {True: "fits", False: "DOES NOT FIT", None: "not known whether it fits"}
            verdict = f", {words[self.whole_fits]} {_short(self.limit)}"
        if self.whole is not None:
            return f"{shown(self.whole)}{verdict}; waiting in the queue is not in it"
        count = len(self.without_figure)
        text = f"not known: {count} {'jobs have' if count > 1 else 'job has'} no figure yet ({how_to_measure()})"
        return f"{text}; the others alone: {shown(self._measured)}{verdict}" if self.whole_fits is False else text

    def _row(self, job: TimedJob) -> tuple[str, ...]:
        found = self.of(job.name)
        tasks = f"{len(job.lines)}" if job.array else ""
        if not job.has_figure:
            return (job.name, tasks, "no figure yet", _short(job.limit), "not known")
        verdict = found.verdict if found.fits is not None else "not known: not all is measured"
        if found.restarts.likely and not math.isinf(found.restarts.likely):
            verdict += f", then {shown(found.wall)}"
        return (job.name, tasks, shown(found.longest), _short(job.limit), verdict)


def sources_of(job: TimedJob) -> list[str]:
    """Where the figures of a job come from."""
    pieces = [piece for line in job.lines for piece in line]
    return list(dict.fromkeys(piece.measured.source for piece in pieces if piece.measured is not None))


def _short(seconds: float) -> str:
    """A limit: `6 h`."""
    text = duration(seconds).replace(".0 s", " s")
    return text.removesuffix(" 0 min").removesuffix(" 0 s").removesuffix(" 0 h")


def shown(span: Span) -> str:
    """A time, or that it never comes."""
    return "never" if math.isinf(span.likely) else span.describe().replace("inf s", "never")


def finite(figures: dict[str, float]) -> dict[str, float | None]:
    """Numbers as JSON can have them: null for infinity."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}
