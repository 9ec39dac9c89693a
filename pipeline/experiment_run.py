"""All experiments of a file inside one allocation: which processes, how long, and what is done already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cache.dataset import read_split
from cache.errors import ConfigError, PipelineError
from cache.processes import Child
from pipeline.allocation import Line, Step
from pipeline.config import PipelineConfig
from pipeline.evaluations import is_evaluated
from pipeline.experiments import Experiment, Stage
from pipeline.gpus import environment_of, visible_gpus
from pipeline.options import PROGRAM, job_of
from train.job import is_finished


def chosen(experiments: Sequence[Experiment], names: Sequence[str]) -> list[Experiment]:
    """The named experiments, in the file's order; all where none is named.

    Raises:
        ConfigError: there is none of that name.
    """
    known = [experiment.name for experiment in experiments]
    for name in names:
        if name not in known or name == "":
            raise ConfigError(
                f"--experiment {name}: there is none of that name", do=f"choose from: {', '.join(known) or 'none'}"
            )
    return [experiment for experiment in experiments if not names or experiment.name in names]


def slots(experiments: Sequence[Experiment], count: int | None) -> list[str]:
    """The GPUs to run on, by their names for CUDA_VISIBLE_DEVICES; empty names where all stages run on the CPU.

    Args:
        count: how many; None for all that there are.

    Raises:
        ConfigError: there are not so many.
    """
    names = visible_gpus()
    on_cpu = all(stage.settings.train.device == "cpu" for one in experiments for stage in one.stages)
    if count is None:
        count = len(names) or int(on_cpu)
    if 0 < count <= len(names):
        return names[:count]
    if on_cpu and count:
        return [""] * count
    raise ConfigError(
        f"--gpus {count}: {len(names)} GPUs are visible here" if count else "no GPU is visible here",
        do="give at most as many; on a machine without GPUs set train.device: cpu",
    )


def lines(
    experiments: Sequence[Experiment], splits: Sequence[str], config: Path, overrides: Sequence[str]
) -> list[Line]:
    """Each experiment as a line of processes: its stages in order, then the evaluations of the last one.

    Raises:
        ConfigError: a split to evaluate is not in data.splits.
    """
    rows: dict[str, float] = {}
    found = []
    for experiment in experiments:
        last = experiment.stages[-1]
        for split in splits:
            if split not in last.settings.data.splits:
                raise ConfigError(
                    f"--split {split}: data.splits names only {', '.join(last.settings.data.splits)}",
                    do="evaluate one of these with --split",
                )
        steps = [_training(stage, config, overrides) for stage in experiment.stages]
        steps += [_evaluation(last, split, config, overrides) for split in splits]
        size = sum(_samples(stage, rows) for stage in experiment.stages if not _is_trained(stage))
        found.append(Line(experiment.name, tuple(steps), size))
    return found


def describe(lines: Sequence[Line], slots: Sequence[str]) -> str:
    """The order in which lines start, and what of each is still to do."""
    told = [f"{len(lines)} experiments on {len(slots)} {'GPUs' if any(slots) else 'processes'}, the longest first:"]
    for line in sorted(lines, key=lambda one: -one.size):
        left = [step.name for step in line.steps if not step.is_done()]
        told.append(
            f"  {line.name or 'the run'}: {line.size:.0f} samples to train on; to do: {', '.join(left) or 'nothing'}"
        )
    return "\n".join(told)


def _training(stage: Stage, config: Path, overrides: Sequence[str]) -> Step:
    command = (*PROGRAM, "train", "--from-cache", *_options(stage, config, overrides))
    return _step(stage, "train", command, lambda: _is_trained(stage))


def _evaluation(stage: Stage, split: str, config: Path, overrides: Sequence[str]) -> Step:
    command = (*PROGRAM, "eval", "--split", split, *_options(stage, config, overrides))
    return _step(stage, f"eval-{split}", command, lambda: is_evaluated(stage.settings, split))


def _step(stage: Stage, verb: str, command: tuple[str, ...], is_done: Callable[[], bool]) -> Step:
    name = " ".join(part for part in (stage.label, verb) if part)
    log = stage.settings.output_dir / f"{verb}.log"
    return Step(name, lambda gpu: Child(name, command, environment_of(gpu), log), is_done)


def _options(stage: Stage, config: Path, overrides: Sequence[str]) -> list[str]:
    names = [f"--experiment={stage.experiment}"] if stage.experiment else []
    names += [f"--stage={stage.name}"] if stage.name else []
    return [f"--config={config}", *names, *(f"--set={override}" for override in overrides)]


def _is_trained(stage: Stage) -> bool:
    try:
        return is_finished(job_of(stage.settings, from_cache=True))
    except ConfigError:
        return False  # run.json is damaged: its own training says so, and the other experiments need not wait for that


def _samples(stage: Stage, rows: dict[str, float]) -> float:
    """Samples that a stage trains on, all epochs together; the length of a step hardly depends on anything else."""
    train = stage.settings.train
    if train.max_steps > 0:
        return train.max_steps * train.effective_batch_size
    if train.split not in rows:
        rows[train.split] = _rows(stage.settings, train.split)
    return rows[train.split] * train.num_train_epochs


def _rows(settings: PipelineConfig, split: str) -> float:
    try:
        return float(len(read_split(settings.data, split).records))
    except PipelineError:
        return 0.0  # its own training says what is wrong, and the other experiments need not wait for that
