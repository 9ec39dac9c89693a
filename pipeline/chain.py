"""From a configuration to the jobs that are still to do: cache, check, training, evaluation, comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache.errors import ConfigError
from pipeline.chain_record import SubmittedJob
from pipeline.config import PipelineConfig
from pipeline.experiments import Experiment, Stage, experiments_of
from slurm.chain import ChainJob
from slurm.config import JobConfig
from slurm.sbatch import ARRAY_TASK, Script, Word

CHECK, COMPARE, ALL = "check", "compare", "experiments"


@dataclass(frozen=True, slots=True)
class Done:
    """What need not be done again.

    Attributes:
        missing_parts: split -> the parts of its cache that are not complete.
        stages: labels of the finished stages.
        evaluations: names of the experiments whose evaluation is there and of their present adapter.
        comparison: whether the table is there and newer than all evaluations.
    """

    missing_parts: Mapping[str, tuple[int, ...]]
    stages: frozenset[str]
    evaluations: frozenset[str]
    comparison: bool


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with what the record keeps about it."""

    chained: ChainJob
    split: str | None = None
    folder: str | None = None

    @property
    def name(self) -> str:
        """Of the job."""
        return self.chained.name

    def submitted(self, number: str) -> SubmittedJob:
        """The record of the job under the number that it got."""
        script = self.chained.script
        return SubmittedJob(
            name=script.name,
            id=number,
            tasks=script.tasks,
            log=script.log_name,
            split=self.split,
            folder=self.folder,
            time_limit=script.asks.seconds,
        )


def splits_of(settings: PipelineConfig) -> list[str]:
    """The splits that training and evaluation read, in the order in which they are cached."""
    found: dict[str, None] = {}
    for experiment in experiments_of(settings):
        for stage in experiment.stages:
            found[stage.settings.train.split] = None
        for stage in experiment.stages:
            held_out = stage.settings.train.eval_split
            if held_out is not None and held_out in stage.settings.data.splits:
                found[held_out] = None
    split = eval_split_of(settings)
    if split is not None:
        found[split] = None
    return list(found)


def eval_split_of(settings: PipelineConfig) -> str | None:
    """What all experiments are evaluated on: the file's train.eval_split, or `val`; None where there is neither."""
    for name in (settings.train.eval_split, "val"):
        if name is not None and name in settings.data.splits:
            return name
    return None


def stage_name(stage: Stage) -> str:
    """Of the job that trains a stage. + is in no name of an experiment or stage, so no two are alike."""
    return "-".join(["train", *(["+".join(p for p in (stage.experiment, stage.name) if p)] if stage.label else [])])


def eval_name(experiment: Experiment) -> str:
    """Of the job that evaluates an experiment."""
    return f"eval-{experiment.name}" if experiment.name else "eval"


def plan_jobs(
    settings: PipelineConfig, config: Path, done: Done, before: Mapping[str, Sequence[str]] | None = None
) -> list[PlannedJob]:
    """The jobs of all work that is not finished, in order, whether they are in the queue already or not.

    Args:
        config: the snapshot of the configuration that the jobs read.
        before: split -> those whose caching must have ended before its own begins (chain_shared).

    Raises:
        ConfigError: `slurm` and the other settings contradict each other.
    """
    common = ("--config", str(config))
    planned = _cache_jobs(settings, common, done, before or {})
    if planned:
        planned.append(_check(settings, common, tuple(job.name for job in planned)))
    experiments, split = experiments_of(settings), eval_split_of(settings)
    if settings.slurm.experiments == "allocation" and settings.experiments:
        work = [] if _all_done(experiments, done) else [_allocation(settings, common)]
        ends: list[str] = [ALL]
    else:
        work = [job for experiment in experiments for job in _experiment(settings, common, experiment, done)]
        ends = [stage_name(e.stages[-1]) if split is None else eval_name(e) for e in experiments]
    planned += work
    if settings.experiments and (work or not done.comparison):
        command = ("pipeline", "compare", *common, *(("--split", split) if split is not None else ()))
        script = Script(COMPARE, "The comparison of all experiments.", command, settings.slurm.light)
        # Also when an experiment has failed: the table says what is missing. Not when the cache has.
        planned.append(PlannedJob(ChainJob(script, after_ok=(CHECK,), after_any=tuple(ends))))
    return planned


def _all_done(experiments: Sequence[Experiment], done: Done) -> bool:
    trained = all(stage.label in done.stages for experiment in experiments for stage in experiment.stages)
    return trained and all(experiment.name in done.evaluations for experiment in experiments)


def _cache_jobs(
    settings: PipelineConfig, common: tuple[str, ...], done: Done, before: Mapping[str, Sequence[str]]
) -> list[PlannedJob]:
    asks = settings.slurm.cache
    if asks.gpus > 1:
        raise ConfigError(
            f"slurm.cache.gpus is {asks.gpus}, but a task of the cache array uses one",
            do="set it to 1 and raise slurm.cache.num_parts",
        )
    planned = []
    for split, missing in done.missing_parts.items():
        command: tuple[Word, ...] = ("pipeline", "cache", *common, "--split", split)
        command = (*command, "--num-parts", str(asks.num_parts), "--part", ARRAY_TASK)
        script = Script(
            _cache_name(split),
            f"The features of the images of split {_in_ascii(split)}, in {asks.num_parts} parts.",
            command,
            asks,
            tasks=missing,
            max_running=asks.max_running,
            stops_on_signal=True,
        )
        # Also when some of it has failed: what it lacks is nobody's then.
        after = tuple(_cache_name(other) for other in before.get(split, ()))
        planned.append(PlannedJob(ChainJob(script, after_any=after), split=split))
    return planned


def _cache_name(split: str) -> str:
    return f"cache-{_in_ascii(split)}"


def _in_ascii(split: str) -> str:
    """A split's name for a job's; + is in no name of a split, so no two are alike."""
    return split if split.isascii() else f"{split.encode('punycode').decode('ascii')}+"


def _check(settings: PipelineConfig, common: tuple[str, ...], waits: tuple[str, ...]) -> PlannedJob:
    wanted = [word for split in splits_of(settings) for word in ("--split", split)]
    command = ("pipeline", "check", *common, *wanted)
    script = Script(CHECK, "Whether the cache is complete.", command, settings.slurm.light)
    return PlannedJob(ChainJob(script, after_ok=waits))


def _experiment(
    settings: PipelineConfig, common: tuple[str, ...], experiment: Experiment, done: Done
) -> list[PlannedJob]:
    planned: list[PlannedJob] = []
    before = CHECK
    for stage in experiment.stages:
        name = stage_name(stage)
        # A stage that starts from an adapter which is made anew is not finished.
        if planned or stage.label not in done.stages:
            planned.append(_train_job(settings, common, stage, name, before))
        before = name
    split = eval_split_of(settings)
    if split is not None and (planned or experiment.name not in done.evaluations):
        command = ("pipeline", "eval", *common, "--split", split, *_named(experiment.name, ""))
        purpose = f"The evaluation on split {_in_ascii(split)}."
        script = Script(eval_name(experiment), purpose, command, settings.slurm.eval)
        planned.append(PlannedJob(ChainJob(script, after_ok=(CHECK, before))))
    return planned


def _train_job(settings: PipelineConfig, common: tuple[str, ...], stage: Stage, name: str, before: str) -> PlannedJob:
    asks = settings.slurm.train
    script = Script(
        name,
        f"Training{f' of {stage.label}' if stage.label else ''} from the cache.".replace("/", "+"),
        ("pipeline", "train", *common, "--from-cache", *_named(stage.experiment, stage.name)),
        asks,
        nodes=asks.nodes,
        stops_on_signal=True,
        processes_per_node=max(asks.gpus, 1),
    )
    folder = stage.settings.output_dir.relative_to(settings.output_dir)
    return PlannedJob(ChainJob(script, after_ok=tuple(dict.fromkeys((CHECK, before)))), folder=str(folder))


def _allocation(settings: PipelineConfig, common: tuple[str, ...]) -> PlannedJob:
    asks = settings.slurm.train
    if asks.nodes > 1 or asks.gpus == 0:
        raise ConfigError(
            f"slurm.experiments: allocation with slurm.train.nodes {asks.nodes} and gpus {asks.gpus}: it uses the GPUs "
            "of one node",
            do="set nodes to 1 and gpus to at least 1, or slurm.experiments: jobs",
        )
    split = eval_split_of(settings)
    if split is None:
        raise ConfigError(
            "slurm.experiments: allocation evaluates all experiments, and there is no split to do it on",
            do="name a split `val` in data.splits, or set train.eval_split",
        )
    command = ("pipeline", "experiments", *common, "--gpus", str(asks.gpus), "--split", split)
    asked = JobConfig.model_validate(asks.model_dump(exclude={"nodes"}))
    script = Script(ALL, "All experiments.", command, asked, stops_on_signal=True)
    return PlannedJob(ChainJob(script, after_ok=(CHECK,)))


def _named(experiment: str, stage: str) -> tuple[str, ...]:
    return tuple(
        word for option, name in (("--experiment", experiment), ("--stage", stage)) if name for word in (option, name)
    )
