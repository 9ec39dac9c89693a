"""TrainConfig -> transformers.TrainingArguments."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from cache.errors import ConfigError
from train.config import TrainConfig

HIGHER_IS_BETTER = {"exact_match": True, "token_f1": True, "point_accuracy": True, "loss": False}


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
            num_train_epochs=config.num_train_epochs,
            max_steps=config.max_steps,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            optim=config.optim,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            tf32=config.tf32 if on_gpu and torch.cuda.get_device_capability()[0] >= 8 else None,
            use_cpu=not on_gpu,
            **_checkpointing(config),
            dataloader_num_workers=config.dataloader_num_workers,
            dataloader_pin_memory=config.dataloader_pin_memory and on_gpu,
            dataloader_prefetch_factor=config.dataloader_prefetch_factor if config.dataloader_num_workers else None,
            dataloader_persistent_workers=config.dataloader_persistent_workers and config.dataloader_num_workers > 0,
            remove_unused_columns=False,
            logging_strategy="steps",
            logging_steps=config.logging_steps,
            logging_nan_inf_filter=False,  # a loss that is not a number must be seen
            eval_strategy=_strategy(config.eval_steps) if evaluate else "no",
            eval_steps=config.eval_steps,
            save_strategy=_strategy(config.save_steps),
            save_steps=config.save_steps or 500,
            save_total_limit=config.save_total_limit,
            load_best_model_at_end=config.load_best_model_at_end,
            metric_for_best_model=config.metric_for_best_model if evaluate else None,
            greater_is_better=HIGHER_IS_BETTER[config.metric_for_best_model] if evaluate else None,
            seed=config.seed,
            disable_tqdm=True,
            report_to=list(config.report_to),
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,  # they are constants
        )
    except ValueError as error:
        raise ConfigError(
            f"train: {error}", do="correct the setting with this value (train.lr_scheduler_type, train.optim, ...)"
        ) from error


def _strategy(steps: int | None) -> str:
    return "epoch" if steps is None else "steps"


def _checkpointing(config: TrainConfig) -> dict[str, Any]:
    # transformers renamed these within the range of versions that is supported.
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
    return {name: config.gradient_checkpointing or False, f"{name}_kwargs": {"use_reentrant": False}}
