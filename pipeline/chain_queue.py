"""What of a chain is in the queue, and what of a plan is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.chain import PlannedJob
from pipeline.chain_record import Chain
from slurm.arrays import parse_name, render_name
from slurm.client import JobInfo

Infos = Mapping[str, Sequence[JobInfo]]


@dataclass(frozen=True, slots=True)
class Queued:
    """What the queue holds of a job of the chain.

    Attributes:
        names: of an array those of the tasks that wait or run, e.g. `12_[0,3]`; several where it was submitted in
            several goes.
        waiting: none of it has begun.
    """

    names: tuple[str, ...]
    waiting: bool = True

    @property
    def ids(self) -> list[str]:
        """SLURM's numbers."""
        return [parse_name(name)[0] for name in self.names]

    @property
    def tasks(self) -> frozenset[int]:
        """Of an array."""
        return frozenset(task for name in self.names for task in parse_name(name)[1] or ())


def queued_of(chain: Chain | None, infos: Infos) -> dict[str, Queued]:
    """What is queued or running of a chain, by name."""
    found: dict[str, Queued] = {}
    for job in chain.jobs if chain is not None else ():
        active = [info for info in infos[job.id] if info.active and info.reason != "DependencyNeverSatisfied"]
        if active:
            before = found.get(job.name, Queued(()))
            tasks = [info.task for info in active if info.task is not None]
            found[job.name] = Queued(
                (*before.names, render_name(job.id, tasks or None)),
                before.waiting and all(info.state == "PENDING" for info in active),
            )
    return found


def to_submit(planned: Sequence[PlannedJob], queued: Mapping[str, Queued]) -> tuple[list[PlannedJob], list[str]]:
    """What of a plan is not in the queue, and the jobs there that have to be submitted anew.

    A job that waits for one that failed will never start, even if that one is submitted again: the two are not tied.

    Returns:
        Jobs to submit, in order; names of waiting jobs to cancel before.
    """
    new: dict[str, PlannedJob] = {}
    cancel = []
    for job in planned:
        there = queued.get(job.name)
        if job.split is not None:
            array = _not_queued(job, planned, queued)
            if array is not None:
                new[job.name] = array
            continue
        loose = any(name in new for name in (*job.chained.after_ok, *job.chained.after_any))
        if there is None or (loose and there.waiting):
            new[job.name] = job
            if there is not None:
                cancel.append(job.name)
    return list(new.values()), cancel


def _not_queued(job: PlannedJob, planned: Sequence[PlannedJob], queued: Mapping[str, Queued]) -> PlannedJob | None:
    """The tasks of a caching array that are not in the queue; None where all are.

    They wait for what is there of the arrays that were to come behind it as well: the two may not run side by side.
    """
    chained = job.chained
    there = queued[job.name].tasks if job.name in queued else frozenset()
    left = tuple(task for task in chained.script.tasks or () if task not in there)
    if not left:
        return None
    behind = [p.name for p in planned if p.split is not None and p.name in queued and job.name in p.chained.after_any]
    script = replace(chained.script, tasks=left)
    return replace(job, chained=replace(chained, script=script, after_any=(*chained.after_any, *behind)))
