"""The verbs of SLURM jobs: submit, status, cancel, and the check that stands in every chain."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.options import ConfigOption, SetOption, load


def submit(
    config: ConfigOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the scripts and their order; write and submit nothing.")
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Submit what is not finished of cache, training and evaluation to SLURM, each job tied to those before it."""
    from pipeline.chain_submit import submit as submit_chain
    from pipeline.progress import Bar
    from slurm.client import SlurmClient

    settings = load(config, overrides)
    with Bar() as progress:
        print(submit_chain(settings, progress, SlurmClient(), dry_run=dry_run))


def status(config: ConfigOption, overrides: SetOption = None) -> None:
    """The jobs of a chain: state, why one waits or failed, progress, and the predicted end against the time limit."""
    from pipeline.chain_status import status as chain_status
    from pipeline.progress import Bar
    from slurm.client import SlurmClient

    settings = load(config, overrides)
    with Bar() as progress:
        text = chain_status(settings, progress, SlurmClient())
    print(text)


def cancel(config: ConfigOption, overrides: SetOption = None) -> None:
    """End all jobs of a chain that wait or run. What they have done is kept."""
    from pipeline.chain_submit import cancel as cancel_chain
    from slurm.client import SlurmClient

    print(cancel_chain(load(config, overrides), SlurmClient()))


def check(
    config: ConfigOption,
    split: Annotated[
        list[str] | None,
        typer.Option(help="Only this split. May be repeated. Default: all that training and evaluation read."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Whether the cache is complete; if not, ends with exit code 4 and names the parts to run again."""
    from cache.progress import Silent
    from pipeline.chain_state import check_cache
    from pipeline.time_measured import new_record
    from pipeline.time_records import JobClock

    settings = load(config, overrides)
    with JobClock(Silent(), settings.output_dir, "check", new_record("check", settings)):
        print(check_cache(settings, split or []))
