"""What a job took: each verb of a chain leaves a small file in the run folder's times/, for `pipeline plan`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from cache.atomic import write_text
from cache.errors import StoppedError
from cache.progress import Progress

TIMES = "times"
MUCH_MORE = 4.0
_CHUNKS = 10


@dataclass(frozen=True, slots=True)
class Phase:
    """Work that grows with the data.

    Attributes:
        units: how many were done.
        seconds: one unit takes so long in the mean, the first bit (loading, compiling, warming up) left out.
        low, high: the 10th and the 90th percentile of that over stretches of the phase.
    """

    units: float
    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class TimeRecord:
    """One run of a job.

    Attributes:
        job: the verb.
        device: name of the GPU, or `cpu`.
        processes: of a training run.
        setting: what decides how fast it is, besides the device.
        seconds: from the start of the process to its end.
        phases: name -> work; the first word of what the verb's progress bar says, and of training `tokens` (of the
            process with most), `evaluating` (samples) and `saving` (checkpoints).
        written: seconds since 1970.
        trials: of a training run that tried rows of several lengths: train.calibrate.Trial as JSON.
    """

    job: str
    device: str
    processes: int
    setting: Mapping[str, Any]
    seconds: float
    phases: Mapping[str, Phase]
    written: float
    trials: Sequence[Mapping[str, Any]] = ()

    @property
    def constant(self) -> float:
        """Seconds that do not grow with the data: start, imports, loading, compiling, saving."""
        return max(0.0, self.seconds - sum(p.units * p.seconds for p in self.phases.values()))

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def parse(cls, content: Any) -> TimeRecord | None:
        """From JSON; None for what is no record."""
        try:
            phases = {name: Phase(**phase) for name, phase in content["phases"].items()}
            return cls(**{**content, "phases": phases})
        except (TypeError, KeyError, AttributeError):
            return None


class _Start:
    """When this process began; a verb that is called from a program of its own begins with its clock."""

    moment: float | None = None


def note_start() -> None:
    """Called by the console script: from here on, records count from the start of the process."""
    _Start.moment = time.monotonic() - process_age()


def process_age() -> float:
    """Seconds since this process was started; a shell that `exec`s the program has started it. 0 where unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def phase_of(marks: Sequence[tuple[float, float]]) -> Phase | None:
    """The rate of a phase.

    Args:
        marks: (seconds, units) of stretches that follow one another. The first one is left out of the rate, but counts
            as work, unless there is no other.
    """
    units = sum(count for _, count in marks)
    rated = [mark for mark in marks[1:] if mark[1] > 0] or [mark for mark in marks if mark[1] > 0]
    if not rated:
        return None
    rates = sorted(_rate(chunk) for chunk in _chunks(rated))
    last = len(rates) - 1
    return Phase(units, _rate(rated), rates[round(0.1 * last)], rates[round(0.9 * last)])


def _rate(marks: Sequence[tuple[float, float]]) -> float:
    return sum(seconds for seconds, _ in marks) / sum(units for _, units in marks)


def _chunks(marks: Sequence[tuple[float, float]]) -> list[Sequence[tuple[float, float]]]:
    """At most so many stretches of about equal length: a single step or image says little about hours of them."""
    count = min(_CHUNKS, len(marks))
    cuts = [len(marks) * place // count for place in range(count + 1)]
    return [marks[start:stop] for start, stop in pairwise(cuts)]


class JobClock:
    """A progress that passes everything on, and writes a record of it when its block is left.

    A run that was asked to stop leaves one too; one that failed does not, nor do processes besides the first.

    Args:
        progress: what draws the bar.
        folder: the run folder.
        name: of the record's file.
        record: with the fields that are known; the others are filled in.
        needs: a phase that tells the rate: an earlier record with MUCH_MORE of it, made the same way, is kept.
        more: other phases, asked for at the end.
    """

    def __init__(
        self,
        progress: Progress,
        folder: Path,
        name: str,
        record: TimeRecord,
        *,
        needs: str = "",
        more: Callable[[], Mapping[str, Phase]] = dict,
    ) -> None:
        self._progress = progress
        self._file = folder / TIMES / f"{name}.json"
        self._record, self._needs, self._more = record, needs, more
        self._began = _Start.moment if _Start.moment is not None else time.monotonic()
        self._marks: dict[str, list[list[tuple[float, float]]]] = {}
        self._open: list[tuple[float, float]] | None = None
        self._last = 0.0

    def __enter__(self) -> JobClock:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if (error is None or isinstance(error, StoppedError)) and os.environ.get("RANK", "0") == "0":
            self._write()

    def start(self, what: str, total: int, unit: str) -> None:
        """See cache.progress.Progress."""
        self._open = []
        self._marks.setdefault(what.split(maxsplit=1)[0], []).append(self._open)
        self._progress.start(what, total, unit)
        self._last = time.monotonic()

    def advance(self, count: int = 1) -> None:
        """See cache.progress.Progress."""
        if self._open is not None:
            now = time.monotonic()
            self._open.append((now - self._last, count))
            self._last = now
        self._progress.advance(count)

    def finish(self) -> None:
        """See cache.progress.Progress."""
        self._open = None
        self._progress.finish()

    def _phases(self) -> dict[str, Phase]:
        found = {}
        for name, runs in self._marks.items():
            # The first bit of the first run only: a second one begins with everything loaded.
            phase = phase_of([mark for marks in runs for mark in marks])
            if phase is not None:
                found[name] = phase
        return found

    def _tells_less(self, phases: Mapping[str, Phase]) -> bool:
        """Whether this was a few images more, the last steps of a resumed run, or nothing, and more is known."""
        phase = phases.get(self._needs)
        if phase is None:
            return self._file.exists()
        return self._known_units() > MUCH_MORE * phase.units

    def _known_units(self) -> float:
        """Of the needed phase, in the record that is there, if that was made the same way on the same device."""
        try:
            earlier = TimeRecord.parse(json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return 0.0
        new = self._record
        if earlier is None or (earlier.device, earlier.processes) != (new.device, new.processes):
            return 0.0
        same = earlier.setting == json.loads(json.dumps(new.setting))
        return earlier.phases[self._needs].units if same and self._needs in earlier.phases else 0.0

    def _write(self) -> None:
        phases = {**self._phases(), **self._more()}
        if self._needs and self._tells_less(phases):
            return
        record = replace(self._record, phases=phases, seconds=time.monotonic() - self._began, written=time.time())
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, record.text())
