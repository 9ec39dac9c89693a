"""A cached dataset and a way to run training on it, as the command line does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.job import Job
from train.run import run_training


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path

    def losses(self) -> dict[int, float]:
        """Training loss by step."""
        return {line["step"]: line["loss"] for line in self.lines() if "samples_per_second" in line}

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def adapter(self) -> dict[str, torch.Tensor]:
        """The saved adapter's tensors."""
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")


def job_of(config: PipelineConfig, *, from_cache: bool = True) -> Job:
    """The training job of a configuration."""
    c = config
    return Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, from_cache)


def stop_in_step(folder: Path, step: int) -> Callable[[], bool]:
    """A request to stop, made while a run is in this step: the line of the step before is written."""
    metrics = folder / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_text().count('"samples_per_second"') >= step - 1


@pytest.fixture
def run_cached(data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path) -> Callable[..., Run]:
    """Caches the sample data once and trains in a named run folder with the given settings."""
    splits = {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}

    def run(name: str, *, stop_at: int | None = None, from_cache: bool = True, **train: Any) -> Run:
        sections = {
            "output_dir": str(tmp_path / name),
            "cache": {"dir": str(tmp_path / "features")},
            "train": {"eval_split": None, **train},
        }
        config = make_config(splits, **sections)
        builder = CacheBuilder(config.model, config.data, config.cache, config.cache_dir)
        for split in splits:
            builder.run(split, Silent())
        should_stop = stop_in_step(config.output_dir, stop_at) if stop_at is not None else lambda: False
        run_training(job_of(config, from_cache=from_cache), Silent(), should_stop)
        return Run(config.output_dir)

    return run
