"""The options that several verbs take, and what they stand for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.printed_commands import note_options, note_splits

if TYPE_CHECKING:
    from pipeline.config import PipelineConfig
    from train.job import Job

# What the console script does. -P: a folder named `cache` in the working directory must not take the place of ours.
PROGRAM = (sys.executable, "-P", "-c", "from pipeline.cli import main; main()")

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The YAML file: model, data, output_dir, ...")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, e.g. train.lora.r=32. May be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it takes; do nothing.")]
AdapterOption = Annotated[
    Path | None, typer.Option(help="Folder of the adapter. Default: the run folder's.", show_default=False)
]
ExperimentOption = Annotated[
    str | None, typer.Option("--experiment", help="Which of the file's experiments.", show_default=False)
]
StageOption = Annotated[str | None, typer.Option("--stage", help="Which stage of the experiment.", show_default=False)]
LastStageOption = Annotated[
    str | None, typer.Option("--stage", help="Which stage of the experiment. Default: the last.", show_default=False)
]


def load(config: Path, overrides: list[str] | None) -> PipelineConfig:
    """The configuration with its overrides."""
    from pipeline.config_file import load_config

    note_options(config, overrides)
    settings = load_config(config, overrides)
    note_splits(list(settings.data.splits))
    return settings


def load_stage(
    config: Path, overrides: list[str] | None, experiment: str | None, stage: str | None, *, last: bool
) -> PipelineConfig:
    """The configuration with its overrides, or that of one stage where the file holds experiments.

    Args:
        last: an experiment stands for its last stage where `stage` is None.
    """
    from pipeline.experiments import find_stage

    return find_stage(load(config, overrides), experiment, stage, last=last).settings


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
