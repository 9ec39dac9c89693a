"""How long rows are and whether activations are recomputed: as set, or as a calibration on the device finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cache.errors import ConfigError
from cache.vision_tower import VisionTower
from train.attention import attention_kind
from train.calibrate import (
    Attempts,
    Trial,
    choose,
    describe,
    read_calibration,
    slowest_process,
    write_calibration,
)
from train.config import DEFAULT_TOKENS_PER_PACK, TrainConfig
from train.model import autocast
from train.step_dataset import StepDataset

logger = logging.getLogger("train")


def with_rows(config: TrainConfig, tokens_per_pack: int, *, gradient_checkpointing: bool) -> TrainConfig:
    """The settings with both decided."""
    return config.model_copy(
        update={"tokens_per_pack": tokens_per_pack, "gradient_checkpointing": gradient_checkpointing}
    )


def with_rows_that_fit(
    config: TrainConfig,
    model: Any,
    steps: Callable[[TrainConfig], StepDataset],
    folder: Path,
    settings: dict[str, Any],
    *,
    device: torch.device,
    tower: VisionTower | None,
    world_size: int,
) -> TrainConfig:
    """The settings with `tokens_per_pack` and `gradient_checkpointing` decided.

    Args:
        model: a PEFT model, ready for training; trials leave it with activation checkpointing or without.
        steps: the training steps of this process under some settings.
        folder: the run folder; keeps the choice, so that a resumed run need not make it again.
        settings: everything that decides the result; another run in the same folder calibrates anew.

    Raises:
        ConfigError: `auto` where memory cannot be tried.
        ResourceError: no row fits.
    """
    if config.tokens_per_pack != "auto":
        return with_rows(config, config.tokens_per_pack, gradient_checkpointing=config.gradient_checkpointing or False)
    if device.type != "cuda":
        logger.info("train.tokens_per_pack: auto is %d where there is no GPU", DEFAULT_TOKENS_PER_PACK)
        return with_rows(config, DEFAULT_TOKENS_PER_PACK, gradient_checkpointing=config.gradient_checkpointing or False)
    if config.fsdp != "none":
        raise ConfigError(
            "train.tokens_per_pack: auto is not there with train.fsdp: the whole model would have to fit to be tried",
            do=f"give a number of tokens, e.g. train.tokens_per_pack: {DEFAULT_TOKENS_PER_PACK}",
        )
    made_for = {**settings, **_circumstances(device, config, world_size)}
    chosen = read_calibration(folder, made_for)
    # The processes try together, or none does: a file may be seen by one node and not yet by another.
    if slowest_process(float(chosen is None), device) or chosen is None:
        chosen = _calibrate(config, model, steps, folder, made_for, device=device, tower=tower)
    logger.info("calibrated: %s", describe(chosen))
    return with_rows(config, chosen.tokens_per_pack, gradient_checkpointing=chosen.gradient_checkpointing)


def _calibrate(
    config: TrainConfig,
    model: Any,
    steps: Callable[[TrainConfig], StepDataset],
    folder: Path,
    made_for: dict[str, Any],
    *,
    device: torch.device,
    tower: VisionTower | None,
) -> Trial:
    dataset = steps(config)
    heaviest, tokens = dataset.heaviest_step(epoch=0)
    attempts = Attempts(
        model,
        lambda budget: steps(with_rows(config, budget, gradient_checkpointing=False)),
        (0, heaviest),
        device=device,
        autocast=lambda: autocast(config, device),
        tower=tower,
    )
    trials = choose(tokens, dataset.longest_sample, config.gradient_checkpointing, attempts)
    # Every process has the same trials: those of the slowest.
    if not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        write_calibration(folder, made_for, trials)
    return trials[0]


def _circumstances(device: torch.device, config: TrainConfig, world_size: int) -> dict[str, Any]:
    """What decides which row fits and is fastest, besides the settings that decide the result."""
    memory = torch.cuda.get_device_properties(device).total_memory
    return {
        "device": torch.cuda.get_device_name(device),
        "memory": int(memory * torch.cuda.get_per_process_memory_fraction(device)),
        "torch": torch.__version__,
        "world_size": world_size,
        "attention": attention_kind(config, device),
        **{name: getattr(config, name) for name in ("torch_compile", "share_prefixes", "gradient_checkpointing")},
    }
