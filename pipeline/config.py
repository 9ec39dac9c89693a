"""The whole configuration: what a YAML file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from cache.config import CacheConfig, DataConfig, ModelConfig, Section, UserPath
from cache.errors import ConfigError
from pipeline.experiment_settings import ExperimentConfig, check_names, with_stage_splits, without_empty
from slurm.config import SlurmConfig
from train.config import EvalConfig, TrainConfig


class PipelineConfig(Section):
    """The whole configuration. Only `model`, `data` and `output_dir` must be given."""

    model: ModelConfig
    """The checkpoint."""
    data: DataConfig
    """The dataset."""
    output_dir: UserPath
    """The run folder: checkpoints, adapter, logs, evaluations."""
    cache: CacheConfig = CacheConfig()
    """The feature cache."""
    train: TrainConfig = TrainConfig()
    """Training."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    experiments: dict[str, ExperimentConfig] = Field(default={})
    """Several experiments over one cache, each with what it changes of the settings above (docs/experiments.md)."""
    slurm: SlurmConfig = SlurmConfig()
    """Jobs of `pipeline submit` (docs/slurm.md)."""

    @model_validator(mode="before")
    @classmethod
    def _stage_splits(cls, value: Any) -> Any:
        return with_stage_splits(value) if isinstance(value, dict) else value

    @field_validator("experiments", mode="before")
    @classmethod
    def _empty_experiments(cls, value: object) -> object:
        return without_empty(value)

    @field_validator("experiments")
    @classmethod
    def _experiment_names(cls, value: dict[str, ExperimentConfig]) -> dict[str, ExperimentConfig]:
        check_names("experiment", value)
        return value

    @property
    def cache_source(self) -> Path | str:
        """Where features are read from: the folder of the cache, or an address."""
        return self.cache.dir if self.cache.dir is not None else self.output_dir / "features"

    @property
    def cache_dir(self) -> Path:
        """The folder of the cache, to write to or to look after.

        Raises:
            ConfigError: it is an address.
        """
        if isinstance(self.cache_source, Path):
            return self.cache_source
        raise ConfigError(
            f"cache.dir is the address {self.cache_source}, which is only ever read from, by train and eval",
            do="set cache.dir to a local folder, and publish that folder afterwards",
        )
