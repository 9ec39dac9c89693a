"""The options that several verbs take, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipeline.config import PipelineConfig
    from train.job import Job

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The YAML file: model, data, output_dir, ...")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, e.g. train.lora.r=32. May be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it takes; do nothing.")]
AdapterOption = Annotated[
    Path | None, typer.Option(help="Folder of the adapter. Default: the run folder's.", show_default=False)
]


def load(config: Path, overrides: list[str] | None) -> PipelineConfig:
    """The configuration with its overrides."""
    from pipeline.config import load_config

    return load_config(config, overrides)


def job_of(settings: PipelineConfig, *, from_cache: bool) -> Job:
    """The sections that training and evaluation need."""
    from train.job import Job

    return Job(
        settings.model,
        settings.data,
        settings.cache,
        settings.train,
        settings.eval,
        settings.cache_source,
        settings.output_dir,
        from_cache,
    )
