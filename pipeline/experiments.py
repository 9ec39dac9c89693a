"""Experiments and their stages, each with settings of its own; all read one cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from pipeline.config_errors import explain
from pipeline.experiment_settings import ExperimentConfig, Overrides, StageConfig
from train.run_folder import ADAPTER


@dataclass(frozen=True, slots=True)
class Stage:
    """One training run of an experiment.

    Attributes:
        experiment, name: empty where the file names none.
        settings: complete, without `experiments`: its output_dir is <output_dir>/<experiment>/<name>, its cache.dir
            that of the file, its train.adapter the adapter of the stage before.
    """

    experiment: str
    name: str
    settings: PipelineConfig

    @property
    def label(self) -> str:
        """`experiment/stage` for messages and logs; one alone where the other is empty."""
        return "/".join(part for part in (self.experiment, self.name) if part)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Stages that follow one another; at least one."""

    name: str
    stages: tuple[Stage, ...]


def experiments_of(settings: PipelineConfig) -> tuple[Experiment, ...]:
    """All experiments of a file, in its order. A file without `experiments` is one named "" with one stage named "".

    Raises:
        ConfigError: an experiment or stage sets something that does not exist or is impossible.
    """
    if not settings.experiments:
        return (Experiment("", (Stage("", "", settings),)),)
    return tuple(_experiment(settings, name, config) for name, config in settings.experiments.items())


def find_stage(settings: PipelineConfig, experiment: str | None, stage: str | None, *, last: bool) -> Stage:
    """The stage that a command line names.

    Args:
        last: an experiment of several stages stands for its last one where `stage` is None.

    Raises:
        ConfigError: it names none where there are several, or one that does not exist.
    """
    if not settings.experiments:
        if experiment is not None or stage is not None:
            raise ConfigError(
                "--experiment and --stage go with a file that has experiments", do="leave them out, or add experiments"
            )
        return experiments_of(settings)[0].stages[0]
    name = _chosen("--experiment", experiment, list(settings.experiments), "the file holds experiments")
    stages = {one.name: one for one in _experiment(settings, name, settings.experiments[name]).stages}
    if stage is None and (last or len(stages) == 1):
        return list(stages.values())[-1]
    if list(stages) == [""]:
        raise ConfigError(f"--stage {stage}: the experiment {name} has no stages", do="leave --stage out")
    return stages[_chosen("--stage", stage, list(stages), f"the experiment {name} has stages")]


def _chosen(option: str, given: str | None, names: Sequence[str], reason: str) -> str:
    if given is not None and given in names:
        return given
    what = f"{option} is missing: {reason}" if given is None else f"{option} {given}: there is none of that name"
    raise ConfigError(what, do=f"give {option} with one of: {', '.join(names)}")


def _experiment(settings: PipelineConfig, name: str, config: ExperimentConfig) -> Experiment:
    stages: list[Stage] = []
    for stage_name, stage in (config.stages or {"": StageConfig()}).items():
        before = stages[-1].settings if stages else None
        stages.append(Stage(name, stage_name, _resolve(settings, (name, config), (stage_name, stage), before)))
    return Experiment(name, tuple(stages))


def _resolve(
    settings: PipelineConfig,
    experiment: tuple[str, ExperimentConfig],
    stage: tuple[str, StageConfig],
    before: PipelineConfig | None,
) -> PipelineConfig:
    # What was not given stays so: some defaults depend on it.
    raw = settings.model_dump(exclude_unset=True, exclude={"experiments"})
    raw = _merged(_merged(raw, _overrides(experiment[1])), _overrides(stage[1]))
    raw["output_dir"] = settings.output_dir / experiment[0] / stage[0]
    raw["cache"] = {**raw.get("cache", {}), "dir": settings.cache_source}
    if before is not None and "adapter" not in stage[1].train:
        raw["train"] = {**raw.get("train", {}), "adapter": before.output_dir / ADAPTER}
    try:
        return PipelineConfig.model_validate(raw)
    except ValidationError as error:
        lines = [_placed(line, experiment, stage) for line in explain(error, PipelineConfig)]
        raise ConfigError("\n  ".join(lines), do="see docs/configuration.md and docs/experiments.md") from None


def _overrides(section: StageConfig) -> Overrides:
    return {name: given for name in ("data", "train", "eval") if (given := getattr(section, name))}


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; any other value takes the place of the one before."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _placed(line: str, experiment: tuple[str, ExperimentConfig], stage: tuple[str, StageConfig]) -> str:
    """The line with the key where the user wrote it: in the stage, or in the experiment."""
    node: Any = _overrides(stage[1])
    for part in line.partition(":")[0].split("."):
        node = node.get(part) if isinstance(node, dict) else None
    in_stage = node is not None
    return f"experiments.{experiment[0]}.{f'stages.{stage[0]}.' if in_stage else ''}{line}"
