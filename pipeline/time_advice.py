"""Where a chain does not fit its time limits: which settings would make it fit, and how long it would take then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.time_chain import As, TimedChain
from pipeline.time_job import TimedJob
from pipeline.time_plan import TimePlan, finite, shown
from pipeline.time_span import Span
from pipeline.time_trials import trials_of


@dataclass(frozen=True, slots=True)
class Change:
    """Some settings changed, and the jobs as they would be then."""

    setting: str
    jobs: Mapping[str, TimedJob]


@dataclass(frozen=True, slots=True)
class Advice:
    """What a change would bring.

    Attributes:
        jobs: the jobs that it changes and that did not fit (all that it changes where only the whole did not), each
            with its time; of an array that of the longest task.
        whole: None where a job has no figure.
        whole_fits: whether the whole ends within its limit then, where it has one; None where that is not known.
        fits: whether all of these then end within their limit in one start, also at their longest; where only the
            whole did not fit, whether the whole does. None where not all of it is measured, and the rest fits.
    """

    setting: str
    jobs: Mapping[str, Span]
    whole: Span | None
    whole_fits: bool | None
    fits: bool | None

    def describe(self) -> str:
        """A line for a person."""
        times = ", ".join(f"{name} {shown(span)}" for name, span in self.jobs.items())
        still = ", which does not fit" if self.whole_fits is False else ""
        whole = shown(self.whole) if self.whole is not None else "not known"
        return f"{self.setting}: {times}; the whole {whole}{still}"

    def figures(self) -> dict[str, Any]:
        """For a JSON file."""
        jobs = {name: span.figures() for name, span in self.jobs.items()}
        fits = {"fits": self.fits, "whole_fits": self.whole_fits}
        whole = finite(self.whole.figures()) if self.whole is not None else None
        return {"setting": self.setting, **fits, "jobs": jobs, "whole": whole}


def advise(plan: TimePlan, families: Iterator[Iterator[Change]]) -> list[Advice]:
    """Of every kind of setting the slightest change that makes it fit, or else the one with the shortest time.

    Args:
        families: see there.
    """
    if plan.fits is not False:
        return []
    found = []
    for family in families:
        best: Advice | None = None
        for change in family:
            advice = _outcome(plan, change)
            enough = advice.fits is not False
            if best is None or enough or _seconds(advice) < _seconds(best):
                best = advice
            if enough:
                break
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda advice: list(_TITLES).index(advice.fits))


def describe(plan: TimePlan, advice: Sequence[Advice]) -> str:
    """For a person; empty where everything fits."""
    if plan.fits is not False:
        return ""
    lines = []
    for fits, title in _TITLES.items():
        told = [f"  - {one.describe()}" for one in advice if one.fits is fits]
        lines += [title, *told] if told else []
    return "\n".join(lines or ["no setting that is known here would shorten it"])


_TITLES: dict[bool | None, str] = {
    True: "each of these would make the jobs that it names fit:",
    None: "each of these would make the jobs that it names fit, as far as there are figures:",
    False: "not enough alone:",
}


def _outcome(plan: TimePlan, change: Change) -> Advice:
    new = plan.with_jobs(change.jobs)
    concerned = [name for name in change.jobs if name in plan.misfits]
    each = [new.of(name).fits for name in concerned] or [new.fits]
    fits = False if False in each else None if None in each else True
    times = {name: new.of(name).longest for name in concerned or change.jobs if change.jobs[name].has_figure}
    return Advice(change.setting, times, new.whole, new.whole_fits, fits)


def _seconds(advice: Advice) -> float:
    return sum(span.likely for span in advice.jobs.values())


def families(chain: TimedChain, plan: TimePlan) -> Iterator[Iterator[Change]]:
    """For every kind of setting that could help: changes of it, from the slightest on."""
    names = plan.misfits or [job.name for job in plan.jobs if job.has_figure]
    trainings = [name for name in names if chain.is_training(name)]
    if any(chain.is_caching(name) for name in names):
        yield _more_parts(chain)
    if trainings:
        yield _more_gpus(chain, trainings)
        yield _other_rows(chain, trainings)
        yield _shorter(chain, trainings)
    evaluations = [name for name in names if chain.is_evaluation(name)]
    if evaluations and plan.misfits:
        yield _fewer_answers(chain, evaluations)


def _more_parts(chain: TimedChain) -> Iterator[Change]:
    now = chain.settings.slurm.cache.num_parts
    for doubled in range(1, 9):
        if now << doubled > chain.images():
            return
        yield Change(f"slurm.cache.num_parts: {now << doubled}", chain.caching(now << doubled))


def _more_gpus(chain: TimedChain, names: Sequence[str]) -> Iterator[Change]:
    asks = chain.settings.slurm.train
    # How much more several processes do on one CPU is not known.
    if all(device == "cpu" for device in chain.devices(names)):
        return
    for gpus in (2, 4, 8):
        if gpus > max(asks.gpus, 1):
            yield Change(f"slurm.train.gpus: {gpus}", chain.training(As(processes=gpus * asks.nodes), names))


def _other_rows(chain: TimedChain, names: Sequence[str]) -> Iterator[Change]:
    first = next(stage for name in names for stage in chain.stages_in(name))
    for trial in trials_of(first.settings, chain.records).faster:
        yield Change(trial.setting, chain.training(As(trial=trial), names))


def _shorter(chain: TimedChain, names: Sequence[str]) -> Iterator[Change]:
    trains = [stage.settings.train for name in names for stage in chain.stages_in(name)]
    by_steps = [train.max_steps for train in trains if train.max_steps > 0]
    if by_steps:
        for tenths in range(9, 0, -1):
            steps = max(by_steps) * tenths // 10
            if steps:
                yield Change(f"train.max_steps: {steps}", chain.training(As(length={"max_steps": steps}), names))
        return
    most = max(train.num_train_epochs for train in trains)
    for epochs in [*range(int(most) if most > int(most) else int(most) - 1, 0, -1), 0.5]:
        if epochs < most:
            length = {"num_train_epochs": float(epochs)}
            yield Change(f"train.num_train_epochs: {epochs}", chain.training(As(length=length), names))


def _fewer_answers(chain: TimedChain, names: Sequence[str]) -> Iterator[Change]:
    most = max(chain.evaluated_samples(name) for name in names)
    for halved in range(1, 7):
        if most >> halved:
            yield Change(f"eval.limit: {most >> halved}", chain.evaluating(names, most >> halved))
