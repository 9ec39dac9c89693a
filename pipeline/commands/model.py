"""The verbs of the adapter: train, eval, predict, merge, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeline.exit import stop_request
from pipeline.options import (
    AdapterOption,
    ConfigOption,
    DryRun,
    ExperimentOption,
    LastStageOption,
    SetOption,
    StageOption,
    job_of,
    load_stage,
)


def train(
    config: ConfigOption,
    from_cache: Annotated[
        bool,
        typer.Option("--from-cache", help="Read features from the cache. Without it the tower runs in every step."),
    ] = False,
    experiment: ExperimentOption = None,
    stage: StageOption = None,
    overrides: SetOption = None,
    dry_run: DryRun = False,
) -> None:
    """Train a LoRA adapter. Goes on from the last checkpoint when the run folder has one."""
    from pipeline.config_file import dump_config
    from pipeline.progress import Bar
    from pipeline.time_measured import training_clock
    from train.job import is_finished
    from train.run import describe, run_training

    settings = load_stage(config, overrides, experiment, stage, last=False)
    job = job_of(settings, from_cache=from_cache)
    with Bar() as progress:
        if dry_run:
            print(describe(job, progress))
            return
        if is_finished(job):
            print(f"already finished: {job.output_dir / 'adapter'}")
            return
        with training_clock(progress, settings) as clock:
            adapter = run_training(job, clock, stop_request.install(), resolved_config=dump_config(settings))
    if adapter is not None:
        print(f"adapter saved in {adapter}")


def evaluate(
    config: ConfigOption,
    split: Annotated[str, typer.Option(help="Which split of data.splits to evaluate.")] = "val",
    adapter: AdapterOption = None,
    base: Annotated[bool, typer.Option("--base", help="Evaluate the model without an adapter.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Run the tower instead of reading the cache.")] = False,
    experiment: ExperimentOption = None,
    stage: LastStageOption = None,
    overrides: SetOption = None,
) -> None:
    """Loss and generated answers on a split, from the cache. Writes predictions.jsonl and metrics.json."""
    from pipeline.evaluations import PREDICTIONS_FILE, evaluation_folder, made_from, write_evaluation
    from pipeline.progress import Bar
    from pipeline.time_measured import new_record
    from pipeline.time_records import JobClock
    from train.evaluate_split import run_evaluation

    settings = load_stage(config, overrides, experiment, stage, last=True)
    job = job_of(settings, from_cache=not live)
    where = _adapter_of(adapter, base, settings.output_dir / "adapter")
    origin = made_from(settings, split, where)
    with Bar() as progress:
        record = new_record("eval", settings)
        with JobClock(progress, settings.output_dir, f"eval-{split}{'-base' if base else ''}", record) as clock:
            result = run_evaluation(job, split, where, clock)
    folder = evaluation_folder(settings, split, base=base)
    write_evaluation(folder, result, origin)
    for name, value in result.scores.items():
        print(f"{name:16s} {value:.4f}")
    print(f"predictions in {folder / PREDICTIONS_FILE}")


def predict(
    prompt: Annotated[
        str, typer.Option(help="The question; `<image>` marks where an image goes, else they go in front.")
    ],
    image: Annotated[list[Path] | None, typer.Option(help="Image file. May be repeated.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The YAML file; names the model.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or hub id, instead of --config.")] = None,
    adapter: AdapterOption = None,
    base: Annotated[bool, typer.Option("--base", help="Without an adapter.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    experiment: ExperimentOption = None,
    stage: LastStageOption = None,
    overrides: SetOption = None,
) -> None:
    """Ask the full stock model, tower included, about a raw image."""
    from cache.errors import ConfigError
    from pipeline.config_file import config_for_model
    from pipeline.experiments import find_stage
    from train.predict import predict as answer

    if (config is None) == (model is None):
        raise ConfigError("predict needs either --config or --model", do="give one of them: each names the model")
    if config is not None:
        settings = load_stage(config, overrides, experiment, stage, last=True)
    else:
        settings = find_stage(config_for_model(str(model), overrides), experiment, stage, last=True).settings
    default = settings.output_dir / "adapter" if config is not None else None
    print(
        answer(
            settings.model,
            settings.cache,
            settings.train,
            settings.eval,
            images=image or [],
            prompt=prompt,
            adapter=_adapter_of(adapter, base, default),
            system=system,
        )
    )


def _adapter_of(given: Path | None, base: bool, default: Path | None) -> Path | None:
    """The adapter that a command line means; None for the bare model, which only --base stands for."""
    from cache.errors import ConfigError

    if base and given is not None:
        raise ConfigError("--base and --adapter exclude each other", do="leave one of them out")
    if base:
        return None
    chosen = given or default
    if chosen is None:
        raise ConfigError(
            "--model alone names no adapter", do="name its folder with --adapter, or ask the bare model with --base"
        )
    return chosen


def merge(
    config: ConfigOption,
    output: Annotated[Path, typer.Option(help="Folder for the merged checkpoint; must not exist.")],
    adapter: AdapterOption = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="REPO", help="Upload it there as well.")] = None,
    experiment: ExperimentOption = None,
    stage: LastStageOption = None,
    overrides: SetOption = None,
) -> None:
    """Merge the adapter into a full checkpoint that the stock class loads."""
    from train.merge import merge as merge_adapter

    settings = load_stage(config, overrides, experiment, stage, last=True)
    where = adapter or settings.output_dir / "adapter"
    print(merge_adapter(settings.model, settings.train, adapter=where, output=output, push_to_hub=push_to_hub))


def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("demo-output"),
) -> None:
    """The whole job on a tiny model and drawn screenshots; no GPU and no hub needed."""
    from pipeline.demo.run import run_demo

    run_demo(output)
