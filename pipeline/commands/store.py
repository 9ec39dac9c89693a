"""The verbs of the feature cache: plan, cache, verify, repack, prune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache.errors import ConfigError
from pipeline.exit import stop_request
from pipeline.options import ConfigOption, DryRun, SetOption, job_of, load
from pipeline.printed_commands import runnable

if TYPE_CHECKING:
    from pipeline.config import PipelineConfig


def plan(
    config: ConfigOption,
    split: Annotated[list[str] | None, typer.Option(help="Only this split. May be repeated.")] = None,
    images_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Rate of the cache stage. Default: as measured in output_dir.")
    ] = None,
    samples_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Rate of training from the cache. Default: as measured.")
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="6h|config",
            help="Instead: the time of every job of the chain and of the whole, from what was measured, against this "
            "limit; `config`: against the limits in slurm.",
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="First measure here: cache, train and evaluate a few samples.")
    ] = False,
    calibration_steps: Annotated[
        int, typer.Option(min=4, help="With --calibrate: steps of training; more are more exact.")
    ] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """What caching would cost and bring, from image headers alone, less what is cached already. Decodes no image.

    With --time-limit or --calibrate: how long every job will take (docs/time-limits.md).
    """
    settings = load(config, overrides)
    if time_limit is None and not calibrate:
        print(_survey(settings, split, images_per_second, samples_per_second, as_json=as_json))
        return
    if split or images_per_second or samples_per_second:
        raise ConfigError(
            "--split, --images-per-second and --samples-per-second do not go with --time-limit and --calibrate, "
            "which take the whole chain and what was measured",
            do="leave them out",
        )
    from pipeline.progress import Bar
    from pipeline.time_report import time_report

    steps = calibration_steps if calibrate else None
    with Bar() as progress:
        text = time_report(settings, progress, stop_request.install(), limit=time_limit, steps=steps, as_json=as_json)
    print(text)


def _survey(
    settings: PipelineConfig,
    splits: list[str] | None,
    images_per_second: float | None,
    samples_per_second: float | None,
    *,
    as_json: bool,
) -> str:
    from cache.rates import find_rates
    from cache.survey import survey_splits
    from pipeline.progress import Bar

    rates = find_rates(settings.output_dir, images_per_second=images_per_second, samples_per_second=samples_per_second)
    with Bar() as progress:
        survey = survey_splits(
            settings.model,
            settings.data,
            settings.cache,
            target=settings.cache_dir,
            splits=splits or list(settings.data.splits),
            rates=rates,
            progress=progress,
        )
    return json.dumps(survey.figures(), indent=1, ensure_ascii=False) if as_json else survey.describe()


def cache(
    config: ConfigOption,
    split: Annotated[str, typer.Option(help="Which split of data.splits to cache.")],
    overrides: SetOption = None,
    dry_run: DryRun = False,
    num_parts: Annotated[int, typer.Option(min=1, help="Divide the images among so many runs of this verb.")] = 1,
    part: Annotated[int, typer.Option(min=0, help="Which part this run does, from 0.")] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="Start a process for each of so many GPUs.")] = 0,
    repair: Annotated[
        bool, typer.Option("--repair", help="First move damaged files aside, and keep what is intact in them.")
    ] = False,
) -> None:
    """Run the vision tower once per image of a split and store its output. Run again, it goes on where it was."""
    from cache.build import CacheBuilder
    from cache.parts import Part
    from pipeline import cache_verbs
    from pipeline.cache_figures import report
    from pipeline.progress import Bar
    from pipeline.time_measured import new_record
    from pipeline.time_records import JobClock

    settings = load(config, overrides)
    mine = Part(part, num_parts)
    if gpus:
        environments = cache_verbs.gpu_environments(settings, gpus, alone=not (mine.of_several or repair or dry_run))
        again = ["--config", str(config), "--split", split, *(f"--set={override}" for override in overrides or [])]
        with Bar() as progress:  # one process looks at the images, the others take its list
            builder = CacheBuilder(settings.model, settings.data, settings.cache, settings.cache_dir)
            builder.list_images(split, progress, stop_request.install(), Part(0, gpus))
        print(cache_verbs.cache_in_processes(settings, again, split, environments, stop_request.install()))
        return
    builder = CacheBuilder(settings.model, settings.data, settings.cache, settings.cache_dir)
    with Bar() as progress:
        if dry_run:
            print(builder.plan(split, progress, mine).describe())
            return
        if repair:
            print(cache_verbs.repair(builder, settings, progress))
        name = f"cache-{split}{f'.{mine.name}' if mine.of_several else ''}"
        with JobClock(progress, settings.output_dir, name, new_record("cache", settings), needs="encoding") as clock:
            summary = builder.run(split, clock, stop_request.install(), mine, list_rejected_in=settings.output_dir)
    print(report(settings, summary, mine))


def verify(
    config: ConfigOption,
    split: Annotated[str | None, typer.Option(help="Only this split and the shards that it needs.")] = None,
    against_live: Annotated[
        bool, typer.Option("--against-live", help="Instead: encode some images again and compare; needs --split.")
    ] = False,
    images: Annotated[int, typer.Option(min=1, help="With --against-live: how many images to encode again.")] = 8,
    records: Annotated[
        int, typer.Option(min=0, help="With --against-live: on how many records to compare loss and answers.")
    ] = 32,
    adapter: Annotated[
        Path | None, typer.Option(help="With --against-live: an adapter for the language model. Default: none.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Read everything that is cached and compare it with its checksums; lists what is damaged or missing."""
    from pipeline import cache_verbs
    from pipeline.progress import Bar
    from train.compare import compare_with_live

    settings = load(config, overrides)
    if against_live and split is None:
        raise ConfigError("verify --against-live needs a split", do=f"give --split {' or '.join(settings.data.splits)}")
    with Bar() as progress:
        if against_live:
            job = job_of(settings, from_cache=True)
            outcome = compare_with_live(job, str(split), images, records, progress, adapter=adapter).describe()
        else:
            outcome = cache_verbs.verify(settings, split, progress)
    print(outcome)


def repack(
    config: ConfigOption,
    shard_format: Annotated[
        str | None, typer.Option("--format", help="safetensors, webdataset or hdf5. Default: as it is.")
    ] = None,
    shard_size: Annotated[int | None, typer.Option(min=1, help="Bytes a shard.", show_default="1 GiB")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="How numbers are stored: float8_e4m3 or int8. Default: as they are.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the copy. Default: cache.dir.")] = None,
    overrides: SetOption = None,
) -> None:
    """Copy the cache into another shard format, shard size or storage dtype. Run again, it goes on where it was."""
    from pipeline.cache_verbs import repack as repack_cache
    from pipeline.progress import Bar

    settings = load(config, overrides)
    with Bar() as progress:
        folder = repack_cache(
            settings,
            output,
            shard_format=shard_format,
            shard_size=shard_size,
            dtype=dtype,
            progress=progress,
            should_stop=stop_request.install(),
        )
    print(f"cache {folder}")


def prune(
    config: ConfigOption,
    fingerprint: Annotated[str | None, typer.Option(metavar="NAME", help="Delete what this fingerprint holds.")] = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Delete temporary files older than an hour, and damaged/.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really delete. Without it nothing is.")] = False,
    dry_run: DryRun = False,
    overrides: SetOption = None,
) -> None:
    """Show what each fingerprint in the cache folder holds; delete what is named, with --yes."""
    from pipeline import cache_verbs

    settings = load(config, overrides)
    done = cache_verbs.prune(settings, fingerprint=fingerprint, leftovers=leftovers, yes=yes and not dry_run)
    print(runnable(done))
