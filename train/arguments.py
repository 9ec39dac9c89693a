"""TrainConfig -> transformers.TrainingArguments."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from cache.errors import ConfigError
from train.best_metric import greater_is_better
from train.config import TrainConfig


def training_arguments(config: TrainConfig, folder: Path, *, evaluate: bool) -> TrainingArguments:
    """Translate the settings.

    Args:
        folder: the run folder.
        evaluate: whether there is an evaluation split.

    Raises:
        ConfigError: transformers refuses a value, e.g. an unknown schedule.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if config.load_best_model_at_end and not evaluate:
        raise ConfigError(
            f"train.load_best_model_at_end needs the evaluation split {config.eval_split!r}, which data.splits lacks",
            do="name it in data.splits, or set train.load_best_model_at_end: false",
        )
    if "wandb" in config.report_to and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "train.report_to names wandb, which is not installed", do="pip install wandb, or leave it out"
        )
    try:
        return TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=1,  # one item of the loader is a whole step
            gradient_accumulation_steps=1,
            remove_unused_columns=False,
            seed=config.seed,
            disable_tqdm=True,
            report_to=list(config.report_to),
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,  # they are constants
            **_optimization(config),
            **_numbers(config, on_gpu=on_gpu),
            **_checkpointing(config),
            **_loading(config, on_gpu=on_gpu),
            **_intervals(config, evaluate=evaluate),
        )
    except ValueError as error:
        raise ConfigError(
            f"train: {error}", do="correct the setting with this value (train.lr_scheduler_type, train.optim, ...)"
        ) from error


def _optimization(config: TrainConfig) -> dict[str, Any]:
    names = ("num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay")
    return {name: getattr(config, name) for name in (*names, "max_grad_norm", "optim")}


def _numbers(config: TrainConfig, *, on_gpu: bool) -> dict[str, Any]:
    return {
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "tf32": config.tf32 if on_gpu and torch.cuda.get_device_capability()[0] >= 8 else None,
        "use_cpu": not on_gpu,
    }


def _loading(config: TrainConfig, *, on_gpu: bool) -> dict[str, Any]:
    workers = config.dataloader_num_workers
    return {
        "dataloader_num_workers": workers,
        "dataloader_pin_memory": config.dataloader_pin_memory and on_gpu,
        "dataloader_prefetch_factor": config.dataloader_prefetch_factor if workers else None,
        "dataloader_persistent_workers": config.dataloader_persistent_workers and workers > 0,
    }


def _intervals(config: TrainConfig, *, evaluate: bool) -> dict[str, Any]:
    return {
        "logging_strategy": "steps",
        "logging_steps": config.logging_steps,
        "logging_nan_inf_filter": False,  # a loss that is not a number must be seen
        "eval_strategy": _strategy(config.eval_steps) if evaluate else "no",
        "eval_steps": config.eval_steps,
        "save_strategy": _strategy(config.save_steps),
        "save_steps": config.save_steps or 500,
        "save_total_limit": config.save_total_limit,
        "load_best_model_at_end": config.load_best_model_at_end,
        "metric_for_best_model": config.metric_for_best_model if evaluate else None,
        "greater_is_better": greater_is_better(config.metric_for_best_model) if evaluate else None,
    }


def _strategy(steps: int | None) -> str:
    return "epoch" if steps is None else "steps"


def _checkpointing(config: TrainConfig) -> dict[str, Any]:
    # transformers renamed these within the range of versions that is supported.
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: config.gradient_checkpointing or False, f"{name}_kwargs": {"use_reentrant": False}}
