"""The verbs of several experiments in one file: experiments, compare."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.exit import stop_request
from pipeline.options import ConfigOption, DryRun, SetOption, load

ManySplits = Annotated[
    list[str] | None, typer.Option("--split", help="Split to evaluate on; may be repeated.", show_default="val")
]
ManyExperiments = Annotated[
    list[str] | None, typer.Option("--experiment", help="Only this experiment; may be repeated.", show_default="all")
]


def experiments(
    config: ConfigOption,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to run on, an experiment each.", show_default="all visible")
    ] = None,
    experiment: ManyExperiments = None,
    split: ManySplits = None,
    overrides: SetOption = None,
    dry_run: DryRun = False,
) -> None:
    """Train and evaluate all experiments of a file, side by side on the GPUs of one machine; then compare them.

    Run again, it takes up only what is missing.
    """
    from pipeline import experiment_run as run
    from pipeline.allocation import failure_of, run_lines
    from pipeline.comparison import write_comparison
    from pipeline.experiment_cache import check_cached
    from pipeline.experiments import experiments_of

    settings = load(config, overrides)
    every = experiments_of(settings)
    wanted = run.chosen(every, experiment or [])
    splits = split or ["val"]
    slots = run.slots(wanted, gpus)
    lines = run.lines(wanted, splits, config, overrides or [])
    print(run.describe(lines, slots))
    again = ["--config", str(config), *(f"--set={override}" for override in overrides or [])]
    check_cached(settings, wanted, lines, splits, again)
    if dry_run:
        return
    failures = run_lines(lines, slots, stop_request.install())
    print(write_comparison(settings.output_dir, every, splits))
    if failures:
        raise failure_of(failures, len(lines))


def compare(config: ConfigOption, split: ManySplits = None, overrides: SetOption = None) -> None:
    """A table of all experiments' metrics: comparison.md, comparison.csv and a picture in output_dir."""
    from cache.progress import Silent
    from pipeline.comparison import write_comparison
    from pipeline.experiments import experiments_of
    from pipeline.time_measured import new_record
    from pipeline.time_records import JobClock

    settings = load(config, overrides)
    with JobClock(Silent(), settings.output_dir, "compare", new_record("compare", settings)):
        print(write_comparison(settings.output_dir, experiments_of(settings), split or ["val"]))
