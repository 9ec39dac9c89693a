"""Whether training can work at all: asked before hours of caching are submitted for it. No weight is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cache.dataset import read_split
from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from pipeline.experiments import Experiment, Stage, experiments_of
from pipeline.options import job_of
from train.run_folder import ADAPTER, find_run

ModelOf = Callable[[], Any]


def check_training(settings: PipelineConfig, finished: Collection[str]) -> None:
    """Check every training that is not finished.

    Args:
        finished: labels of the stages that are.

    Raises:
        ConfigError: a training would fail by its settings, its adapter, its run folder or the checkpoint; says which.
        DataError: the evaluation split cannot be read.
    """
    experiments = experiments_of(settings)
    todo = [stage for one in experiments for stage in one.stages if stage.label not in finished]
    if not todo:
        return
    from train.chat import ChatEncoder
    from train.empty_model import empty_model

    _require_weights(settings)
    model = empty_model(settings.model)
    ChatEncoder.from_checkpoint(settings.model, int(model.config.image_token_id))
    for experiment in experiments:
        made: dict[Path, Stage] = {}
        for stage in experiment.stages:
            if stage in todo:
                with _named(stage):
                    _check_settings(stage, model)
                    _check_adapter(stage, made, _elsewhere(experiments, experiment, finished), model)
                    _check_folder(stage, made)
                made[_adapter_of(stage)] = stage
    in_fp8 = [stage for stage in todo if stage.settings.train.quantization == "fp8"]
    if in_fp8:
        with _named(in_fp8[0]):
            _check_fp8(settings)


@contextmanager
def _named(stage: Stage) -> Iterator[None]:
    """Say which training it is, where the file names several."""
    try:
        yield
    except ConfigError as error:
        if not stage.label:
            raise
        raise ConfigError(f"{stage.label}: {error.what}", where=error.where, do=error.do) from error


def _require_weights(settings: PipelineConfig) -> None:
    """All files of weights are there and whole, of a checkpoint folder; of a hub model the names only."""
    from safetensors import SafetensorError, safe_open

    from cache.checkpoint import weight_map

    files = sorted({file for _, file in weight_map(settings.model)})
    folder = Path(settings.model.name_or_path)
    for name in files if folder.is_dir() else []:
        try:
            with safe_open(folder / name, framework="pt"):  # compares the file's length with what its header says
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the weights cannot be read: {error}",
                where=str(folder / name),
                do="copy or download the checkpoint again",
            ) from error


def _check_settings(stage: Stage, model: Any) -> None:
    import torch

    from cache import flash
    from train.arguments import training_arguments
    from train.attention import attention_kind
    from train.held_out import has_eval_split
    from train.lora import target_pattern

    settings, train = stage.settings, stage.settings.train
    if train.split not in settings.data.splits:
        raise ConfigError(
            f"train.split is {train.split!r}, but data.splits names only {', '.join(settings.data.splits)}",
            do="name one of them",
        )
    evaluate = has_eval_split(job_of(settings, from_cache=True))
    with _environment_kept():
        training_arguments(train, settings.output_dir, evaluate=evaluate)
    if train.device == "cpu":
        attention_kind(train, torch.device("cpu"))
    if train.attention == "flash":
        flash.require_installed("train.attention: flash", otherwise="auto or flex")
    if settings.cache.attn_implementation == "flash_attention_4":
        flash.require_installed("cache.attn_implementation: flash_attention_4", otherwise="sdpa")
    target_pattern(model, train.lora)
    if evaluate:
        _check_metric(settings)


@contextmanager
def _environment_kept() -> Iterator[None]:
    """transformers leaves notes for its launcher in the environment, which jobs would inherit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check_metric(settings: PipelineConfig) -> None:
    from train.best_metric import require_given

    metric, split = settings.train.metric_for_best_model, settings.train.eval_split
    if split is None or metric in ("loss", "exact_match", "token_f1"):
        return
    require_given(metric, split, read_split(settings.data, split).records)


def _adapter_of(stage: Stage) -> Path:
    """Where a stage saves its adapter; a configuration may spell the folder in several ways."""
    return (stage.settings.output_dir / ADAPTER).absolute().resolve()


def _elsewhere(
    experiments: Collection[Experiment], this: Experiment, finished: Collection[str]
) -> Mapping[Path, Stage]:
    """The adapters that stages of other experiments are still to make."""
    return {
        _adapter_of(stage): stage
        for experiment in experiments
        if experiment is not this
        for stage in experiment.stages
        if stage.label not in finished
    }


def _check_adapter(stage: Stage, made: Mapping[Path, Stage], elsewhere: Mapping[Path, Stage], model: Any) -> None:
    from train.adapter import require_adapter
    from train.lora import require_same

    train = stage.settings.train
    if train.adapter is None:
        return
    place = train.adapter.absolute().resolve()
    if place in made:
        _check_same_lora(made[place], stage, model)
        return
    advice = "set train.adapter to an adapter's folder"
    if place in elsewhere:
        other = elsewhere[place].label
        advice = f"{other} makes it, and experiments do not wait for each other: train it first, or make this its stage"
    require_adapter(train.adapter, advice)
    require_same(model, train.lora, train.adapter)


def _check_same_lora(before: Stage, stage: Stage, model: Any) -> None:
    """A stage goes on with the adapter of the one before, so the adapter's form is the same; dropout may be another."""
    from train.lora import target_pattern

    there, now = before.settings.train.lora, stage.settings.train.lora
    names = [name for name in ("r", "lora_alpha", "use_rslora") if getattr(there, name) != getattr(now, name)]
    if there.target_modules != now.target_modules:
        patterns = [re.compile(target_pattern(model, lora)) for lora in (there, now)]
        matches = [tuple(bool(pattern.fullmatch(name)) for pattern in patterns) for name, _ in model.named_modules()]
        names += ["target_modules"] if any(one != other for one, other in matches) else []
    differences = [f"train.lora.{name}: {getattr(there, name)!r} there, {getattr(now, name)!r} now" for name in names]
    if differences:
        raise ConfigError(
            f"it starts from the adapter of {before.label}, which will not be as train.lora says:\n    "
            + "\n    ".join(differences),
            do="give both the same train.lora, or set train.adapter: null to start afresh",
        )


def _check_folder(stage: Stage, made: Mapping[Path, Stage]) -> None:
    """The run folder holds this run or none. What it started from is not compared while that is still to be made."""
    job = job_of(stage.settings, from_cache=True)
    if job.train.adapter is None or job.train.adapter.absolute().resolve() not in made:
        find_run(job.output_dir, job.settings(), resume=job.train.resume)


def _check_fp8(settings: PipelineConfig) -> None:
    from train.empty_model import empty_model
    from train.fp8 import to_fp8

    to_fp8(empty_model(settings.model).model.language_model)
