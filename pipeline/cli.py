"""The verbs. How they end: pipeline.exit.EXIT_CODES."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.exit import configure_logging, exit_code_of, stop_request

if TYPE_CHECKING:
    from pipeline.config import PipelineConfig
    from train.job import Job

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune Qwen3-VL with the frozen vision tower run once per image.\n\n"
    "plan: what the cache costs and brings. cache: run the tower, store its output. verify, prune: look after it. "
    "train: LoRA or QLoRA from that store. eval, predict, merge: what comes after.",
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The YAML file: model, data, output_dir, ...")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a setting, e.g. train.lora.r=32. May be repeated."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and what it takes; do nothing.")]
AdapterOption = Annotated[
    Path | None, typer.Option(help="Folder of the adapter. Default: the run folder's.", show_default=False)
]


@app.command()
def plan(
    config: ConfigOption,
    split: Annotated[list[str] | None, typer.Option(help="Only this split. May be repeated.")] = None,
    images_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Rate of the cache stage. Default: as measured in output_dir.")
    ] = None,
    samples_per_second: Annotated[
        float | None, typer.Option(min=1e-9, help="Rate of training from the cache. Default: as measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    overrides: SetOption = None,
) -> None:
    """What caching would cost and bring, from image headers alone: no image is decoded, no weight is read."""
    from cache.rates import find_rates
    from cache.survey import survey_splits
    from pipeline.progress import Bar

    settings = _load(config, overrides)
    rates = find_rates(settings.output_dir, images_per_second=images_per_second, samples_per_second=samples_per_second)
    with Bar() as progress:
        survey = survey_splits(
            settings.model,
            settings.data,
            settings.cache,
            target=settings.cache_dir,
            splits=split or list(settings.data.splits),
            rates=rates,
            progress=progress,
        )
    print(json.dumps(survey.figures(), indent=1, ensure_ascii=False) if as_json else survey.describe())


@app.command()
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
    from pipeline.progress import Bar

    settings = _load(config, overrides)
    mine = Part(part, num_parts) if num_parts > 1 or part else None
    if gpus:
        environments = cache_verbs.gpu_environments(settings, gpus, alone=not (mine or repair or dry_run))
        again = ["--config", str(config), "--split", split, *(f"--set={override}" for override in overrides or [])]
        print(cache_verbs.cache_in_processes(settings, again, split, environments, stop_request.install()))
        return
    builder = CacheBuilder(settings.model, settings.data, settings.cache, settings.cache_dir)
    with Bar() as progress:
        if dry_run:
            print(builder.plan(split, progress, mine).describe())
            return
        if repair:
            print(cache_verbs.repair(builder, settings, progress))
        summary = builder.run(split, progress, stop_request.install(), mine)
    print(cache_verbs.report(settings, summary, mine))


@app.command()
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
    from cache.errors import ConfigError
    from pipeline import cache_verbs
    from pipeline.progress import Bar
    from train.compare import compare_with_live

    settings = _load(config, overrides)
    if against_live and split is None:
        raise ConfigError("verify --against-live needs a split", do="give one with --split")
    with Bar() as progress:
        if against_live:
            job = _job(settings, from_cache=True)
            outcome = compare_with_live(job, str(split), images, records, progress, adapter=adapter).describe()
        else:
            outcome = cache_verbs.verify(settings, split, progress)
    print(outcome)


@app.command()
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

    settings = _load(config, overrides)
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


@app.command()
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

    settings = _load(config, overrides)
    print(cache_verbs.prune(settings, fingerprint=fingerprint, leftovers=leftovers, yes=yes and not dry_run))


@app.command()
def train(
    config: ConfigOption,
    from_cache: Annotated[
        bool,
        typer.Option("--from-cache", help="Read features from the cache. Without it the tower runs in every step."),
    ] = False,
    overrides: SetOption = None,
    dry_run: DryRun = False,
) -> None:
    """Train a LoRA adapter. Goes on from the last checkpoint when the run folder has one."""
    from pipeline.config import dump_config
    from pipeline.progress import Bar
    from train.run import describe, is_finished, run_training

    settings = _load(config, overrides)
    job = _job(settings, from_cache=from_cache)
    with Bar() as progress:
        if dry_run:
            print(describe(job, progress))
            return
        if is_finished(job):
            print(f"already finished: {job.output_dir / 'adapter'}")
            return
        adapter = run_training(job, progress, stop_request.install(), resolved_config=dump_config(settings))
    if adapter is not None:
        print(f"adapter saved in {adapter}")


@app.command("eval")
def evaluate(
    config: ConfigOption,
    split: Annotated[str, typer.Option(help="Which split of data.splits to evaluate.")] = "val",
    adapter: AdapterOption = None,
    base: Annotated[bool, typer.Option("--base", help="Evaluate the model without an adapter.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Run the tower instead of reading the cache.")] = False,
    overrides: SetOption = None,
) -> None:
    """Loss and generated answers on a split, from the cache. Writes predictions.jsonl and metrics.json."""
    from cache.atomic import write_text
    from pipeline.progress import Bar
    from train.evaluate_split import run_evaluation

    settings = _load(config, overrides)
    job = _job(settings, from_cache=not live)
    where = None if base else adapter or settings.output_dir / "adapter"
    with Bar() as progress:
        result = run_evaluation(job, split, where, progress)
    folder = settings.output_dir / (f"eval-{split}-base" if base else f"eval-{split}")
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in result.predictions)
    write_text(folder / "predictions.jsonl", lines)
    write_text(folder / "metrics.json", json.dumps(result.scores, indent=1))
    for name, value in result.scores.items():
        print(f"{name:16s} {value:.4f}")
    print(f"predictions in {folder / 'predictions.jsonl'}")


@app.command()
def predict(
    prompt: Annotated[
        str, typer.Option(help="The question; `<image>` marks where an image goes, else they go in front.")
    ],
    image: Annotated[list[Path] | None, typer.Option(help="Image file. May be repeated.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The YAML file; names the model.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or hub id, instead of --config.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of the adapter. Default: the run folder's, if any.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Without an adapter.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    overrides: SetOption = None,
) -> None:
    """Ask the full stock model, tower included, about a raw image."""
    from cache.errors import ConfigError
    from pipeline.config import config_for_model
    from train.predict import predict as answer

    if (config is None) == (model is None):
        raise ConfigError("predict needs either --config or --model", do="give one of them: each names the model")
    settings = _load(config, overrides) if config is not None else config_for_model(str(model), overrides)
    default = settings.output_dir / "adapter"
    chosen = adapter or (default if config is not None and default.is_dir() else None)
    print(
        answer(
            settings.model,
            settings.cache,
            settings.train,
            settings.eval,
            images=image or [],
            prompt=prompt,
            adapter=None if base else chosen,
            system=system,
        )
    )


@app.command()
def merge(
    config: ConfigOption,
    output: Annotated[Path, typer.Option(help="Folder for the merged checkpoint; must not exist.")],
    adapter: AdapterOption = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="REPO", help="Upload it there as well.")] = None,
    overrides: SetOption = None,
) -> None:
    """Merge the adapter into a full checkpoint that the stock class loads."""
    from train.merge import merge as merge_adapter

    settings = _load(config, overrides)
    where = adapter or settings.output_dir / "adapter"
    print(merge_adapter(settings.model, settings.train, adapter=where, output=output, push_to_hub=push_to_hub))


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("demo-output"),
) -> None:
    """The whole job on a tiny model and drawn screenshots; no GPU and no hub needed."""
    from pipeline.demo.run import run_demo

    run_demo(output)


def main() -> None:
    """The console script."""
    # Rows of ever new lengths fragment the GPU's memory otherwise. Read by torch when it is first imported.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    configure_logging()
    sys.exit(exit_code_of(lambda: app(standalone_mode=False)))


def _load(config: Path, overrides: list[str] | None) -> PipelineConfig:
    from pipeline.config import load_config

    return load_config(config, overrides)


def _job(settings: PipelineConfig, *, from_cache: bool) -> Job:
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
