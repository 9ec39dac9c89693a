"""The chain of a configuration with its predicted times, and with other settings in place of those that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cache.progress import Progress
from pipeline.chain import ALL, CHECK, COMPARE, PlannedJob, eval_name, eval_split_of, plan_jobs, stage_name
from pipeline.chain_record import ChainFolder
from pipeline.chain_shared import splits_before
from pipeline.chain_state import find_done
from pipeline.config import PipelineConfig
from pipeline.experiments import Experiment, Stage, experiments_of
from pipeline.time_job import EFFICIENCY, Piece, TimedJob
from pipeline.time_measured import choose, find_records, setting_of
from pipeline.time_plan import TimePlan
from pipeline.time_records import TimeRecord
from pipeline.time_trials import Trial, trials_of
from pipeline.time_work import Amounts
from train.job import is_finished

NOTES = (
    "what runs at the same time does not slow each other down (disk, network)",
    "SLURM starts a job at once: waiting in the queue, and after a restart, is not in it",
)


@dataclass(frozen=True, slots=True)
class As:
    """How trainings are to be taken, where not as they are set."""

    processes: int | None = None
    trial: Trial | None = None
    length: Mapping[str, float] | None = None


class TimedChain:
    """Jobs with their times under some settings.

    Args:
        time_limit: seconds, instead of every job's own limit and for the whole; None for the jobs' own.

    Raises:
        PipelineError: the model, the data or the cache cannot be used, as in `pipeline submit`.
    """

    def __init__(self, settings: PipelineConfig, progress: Progress, time_limit: float | None) -> None:
        self.settings = settings
        self._limit = time_limit
        self.experiments = experiments_of(settings)
        self._stages = {stage_name(s): s for e in self.experiments for s in e.stages}
        self._evals = {eval_name(e): e for e in self.experiments}
        self.amounts = Amounts(settings, progress)
        self.found = find_records(settings, [stage.settings for stage in self._stages.values()])
        done, _ = find_done(settings, progress)
        before = splits_before(settings.data, list(done.missing_parts))
        planned = plan_jobs(settings, ChainFolder(settings.output_dir).config, done, before)
        self._planned = {job.name: job for job in planned}

    def plan(self) -> TimePlan:
        """With the settings as they are."""
        jobs = tuple(self._job(job) for job in self._planned.values())
        several = any(p.processes > 1 for job in jobs for line in job.lines for p in line)
        shared = (
            f"N processes that share a step do {EFFICIENCY.likely:.2f} N times the work of one "
            f"({EFFICIENCY.low:.2f} N - {EFFICIENCY.high:g} N); two GPUs did 1.95 times, more were not measured"
        )
        lead = (
            f"training and caching stop {self.settings.slurm.signal_seconds} s (slurm.signal_seconds) ahead of a limit"
        )
        return TimePlan(jobs, self._limit, (*NOTES, lead, *([shared] if several else [])))

    @property
    def records(self) -> list[TimeRecord]:
        """All that was measured."""
        return [one.record for one in self.found]

    def caching(self, num_parts: int) -> dict[str, TimedJob]:
        """The caching jobs with so many parts."""
        return {
            name: self._job(job, num_parts=num_parts) for name, job in self._planned.items() if job.split is not None
        }

    def training(self, how: As, names: Sequence[str]) -> dict[str, TimedJob]:
        """Some of the jobs that train, taken otherwise."""
        return {name: self._job(self._planned[name], how=how) for name in names}

    def evaluating(self, names: Sequence[str], limit: int) -> dict[str, TimedJob]:
        """Some evaluations of so many samples at most."""
        return {name: self._job(self._planned[name], eval_limit=limit) for name in names}

    def stages_in(self, name: str) -> list[Stage]:
        """The stages that a job trains and that are not finished."""
        if name == ALL:
            every = [stage for experiment in self.experiments for stage in experiment.stages]
            return [stage for stage in every if not is_finished(job_of_stage(stage))]
        return [self._stages[name]] if name in self._stages else []

    def is_training(self, name: str) -> bool:
        """Whether a job trains."""
        return name == ALL or name in self._stages

    def is_evaluation(self, name: str) -> bool:
        """Whether a job evaluates and does nothing else."""
        return name in self._evals

    def is_caching(self, name: str) -> bool:
        """Whether a job runs the tower."""
        return self._planned[name].split is not None

    def devices(self, names: Sequence[str]) -> set[str]:
        """On which the training of these jobs was measured."""
        pieces = [self._training(stage, As()) for name in names for stage in self.stages_in(name)]
        return {piece.measured.device for piece in pieces if piece.measured is not None} or {"cpu"}

    def images(self) -> int:
        """Of the split with most images that are not cached."""
        splits = {job.split for job in self._planned.values() if job.split is not None}
        return max((self.amounts.images(split) for split in splits), default=0)

    def evaluated_samples(self, name: str) -> int:
        """That an evaluation generates answers to."""
        return int(self._job(self._planned[name]).lines[0][0].work["generating"])

    def _job(
        self,
        planned: PlannedJob,
        *,
        num_parts: int | None = None,
        how: As | None = None,
        eval_limit: int | None = None,
    ) -> TimedJob:
        script = planned.chained.script
        how = how or As()
        lines: tuple[tuple[Piece, ...], ...]
        at_once = script.max_running
        name = planned.name
        if planned.split is not None:
            lines = self._parts(planned, planned.split, num_parts or self.settings.slurm.cache.num_parts)
        elif name == ALL:
            at_once = how.processes or self.settings.slurm.train.gpus
            one = replace(how, processes=1)
            lines = tuple(self._line(experiment, one) for experiment in self.experiments)
        elif name in self._stages:
            lines = ((self._training(self._stages[name], how),),)
        elif name in self._evals:
            lines = ((self._evaluation(self._evals[name], eval_limit),),)
        else:
            lines = ((self._light(name),),)
        return TimedJob(
            name=name,
            lines=lines,
            limit=self._limit or script.asks.seconds,
            lead=self.settings.slurm.signal_seconds if script.stops_on_signal else None,
            after=(*planned.chained.after_ok, *planned.chained.after_any),
            at_once=at_once,
            most_restarts=self.settings.slurm.max_requeues if script.stops_on_signal else None,
            array=planned.split is not None,
        )

    def _parts(self, planned: PlannedJob, split: str, num_parts: int) -> tuple[tuple[Piece, ...], ...]:
        measured = choose(self.found, "cache", setting_of("cache", self.settings))
        before = [other for name in planned.chained.after_any if (other := self._planned[name].split) is not None]
        works = self.amounts.cache(split, num_parts, before)
        # A part without an image has to find that out.
        return tuple(
            (Piece(f"cache-{split}", measured, works.get(part, {"reading": 0.0})),) for part in range(num_parts)
        )

    def _training(self, stage: Stage, how: As) -> Piece:
        asks, settings = self.settings.slurm.train, stage.settings
        processes = how.processes or max(asks.gpus, 1) * asks.nodes
        now = trials_of(settings, self.records).current
        work, spread = self.amounts.training(
            settings,
            processes=processes,
            # What other rows change is in the time of their trial.
            tokens_per_pack=now.tokens_per_pack if now is not None else None,
            length=_length(stage, how.length),
        )
        return Piece(
            name=stage_name(stage),
            measured=choose(self.found, "train", setting_of("train", settings), processes),
            work=work,
            spread=spread,
            processes=processes,
            factor=how.trial.seconds / now.seconds if how.trial is not None and now is not None else 1.0,
        )

    def _evaluation(self, experiment: Experiment, limit: int | None) -> Piece:
        settings = experiment.stages[-1].settings
        measured = choose(self.found, "eval", setting_of("eval", settings))
        split = eval_split_of(self.settings)
        assert split is not None
        return Piece(
            eval_name(experiment), measured, self.amounts.evaluation(settings, split, limit or settings.eval.limit)
        )

    def _line(self, experiment: Experiment, how: As) -> tuple[Piece, ...]:
        left = [stage for stage in experiment.stages if not is_finished(job_of_stage(stage))]
        return (*(self._training(stage, how) for stage in left), self._evaluation(experiment, None))

    def _light(self, name: str) -> Piece:
        setting = setting_of("check", self.settings)
        jobs = {CHECK: ["check", "compare"], COMPARE: ["compare", "check"]}[name]
        measured = next((m for job in jobs if (m := choose(self.found, job, setting)) is not None), None)
        return Piece(name, measured, {})


def job_of_stage(stage: Stage) -> Any:
    """For questions about its run folder."""
    from pipeline.options import job_of

    return job_of(stage.settings, from_cache=True)


def _length(stage: Stage, length: Mapping[str, float] | None) -> Mapping[str, float] | None:
    """At most that long: a stage that is shorter stays so."""
    if length is None:
        return None
    train = stage.settings.train
    return {name: min(value, getattr(train, name)) for name, value in length.items() if getattr(train, name) > 0}
