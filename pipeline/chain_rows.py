"""Rows must stay those that something was trained on, and, while a chain is at work, those it was submitted with."""

from __future__ import annotations

from collections.abc import Mapping

from cache.content import rows_digest
from cache.errors import ConfigError
from pipeline.chain import stage_name
from pipeline.chain_queue import Queued
from pipeline.chain_record import Chain, ChainFolder
from pipeline.config import PipelineConfig
from pipeline.experiments import experiments_of
from train.run_folder import rows_of


def training_rows(settings: PipelineConfig) -> dict[str, str]:
    """Split -> digest of its rows, for each split that a training reads; what is only evaluated on decides no training.

    Raises:
        DataError: the rows of a split cannot be read.
    """
    stages = [stage.settings for experiment in experiments_of(settings) for stage in experiment.stages]
    return {split: rows_digest(settings.data, split) for split in dict.fromkeys(s.train.split for s in stages)}


def require_same_rows(
    settings: PipelineConfig,
    folder: ChainFolder,
    chain: Chain | None,
    queued: Mapping[str, Queued],
    rows: Mapping[str, str],
) -> None:
    """Refuse rows that differ from those that something was trained on, or of a chain that is at work.

    Until then they may be corrected. A chain that was submitted before rows were recorded is let through.

    Raises:
        ConfigError: names the split, and what was trained on its rows.
    """
    there = chain.rows if chain is not None else {}
    for split, digest in rows.items():
        rows_of_split = f"the rows of split {split} ({settings.data.splits[split].path})"
        trained = _trained_on_others(settings, split, digest)
        if trained:
            raise ConfigError(
                f"{rows_of_split} have changed since they were trained on: {', '.join(trained)}",
                where=str(folder.folder),
                do="give another output_dir (with cache.dir the cache is still used), or set the rows back",
            )
        if queued and there.get(split, digest) != digest:
            raise ConfigError(
                f"jobs of this run folder are still queued or running ({', '.join(queued)}), and {rows_of_split} have "
                "changed since they were submitted",
                where=str(folder.folder),
                do="set them back, or run `pipeline cancel` first, or give another output_dir",
            )


def _trained_on_others(settings: PipelineConfig, split: str, digest: str) -> list[str]:
    """Names of the trainings on a split that have something to show for other rows."""
    every = [stage for experiment in experiments_of(settings) for stage in experiment.stages]
    return [
        stage_name(stage)
        for stage in every
        if stage.settings.train.split == split and rows_of(stage.settings.output_dir) not in (None, digest)
    ]
