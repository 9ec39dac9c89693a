"""LoRA on the language model only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.errors import ConfigError
from train.config import LoraConfig

LANGUAGE_MODEL = "language_model"


def add_lora(model: Any, config: LoraConfig, *, seed: int) -> Any:
    """Wrap a model in a PEFT model with fresh adapters.

    Args:
        model: a stock model, with or without its tower.
        seed: of the adapters' initial weights; the same seed gives the same weights whatever ran before.

    Raises:
        ConfigError: no module matches, or a target lies in the vision tower.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import TaskType, get_peft_model

    peft_config = PeftLoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type, unused-ignore]
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        target_modules=target_pattern(model, config),
        task_type=TaskType.CAUSAL_LM,
    )
    torch.manual_seed(seed)
    return get_peft_model(model, peft_config)


def target_pattern(model: Any, config: LoraConfig) -> str:
    """A regular expression over full module names that matches the targets inside the language model.

    Raises:
        ConfigError: a target matches nothing there, or lies in the vision tower.
    """
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    inside = [name for name in linear if f".{LANGUAGE_MODEL}." in f".{name}"]
    kinds = sorted({name.rsplit(".", 1)[-1] for name in inside})
    if config.target_modules == "all-linear":
        wanted = kinds
    else:
        wanted = list(config.target_modules)
        if not wanted:
            raise ConfigError("train.lora.target_modules: names no module", do=f"choose from {', '.join(kinds)}")
        for target in wanted:
            _check_target(target, inside, kinds)
    return rf".*\.?{LANGUAGE_MODEL}\.(.*\.)?({'|'.join(re.escape(target) for target in wanted)})"


def _check_target(target: str, inside: list[str], kinds: list[str]) -> None:
    if any(name == target or name.endswith(f".{target}") for name in inside):
        return
    in_tower = target in {"qkv", "proj", "linear_fc1", "linear_fc2"} or target.partition(".")[0] in {"visual", "merger"}
    reason = "lies in the vision tower, whose output is frozen" if in_tower else "matches no linear layer"
    raise ConfigError(
        f"train.lora.target_modules: {target!r} {reason}",
        do=f"choose from {', '.join(kinds)}, or all-linear",
    )


def load_adapter(model: Any, adapter: Path | None) -> Any:
    """The model under an adapter by PEFT's own loader; the bare model for None.

    Raises:
        ConfigError: the folder holds no adapter, or one for another model.
    """
    if adapter is None:
        return model
    if not (adapter / "adapter_config.json").is_file():
        raise ConfigError(
            "there is no adapter here (no adapter_config.json)",
            where=str(adapter),
            do="train first, or name the adapter's folder with --adapter; --base leaves it out",
        )
    if not (adapter / "adapter_model.safetensors").is_file():
        raise ConfigError(
            "the adapter has no adapter_model.safetensors; pickled weights are not read",
            where=str(adapter),
            do="save it again with safetensors",
        )
    from peft import PeftModel, get_peft_model_state_dict

    try:
        loaded = PeftModel.from_pretrained(model, str(adapter))
        with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
            stored = set(file.keys())
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"the adapter does not fit the model, or is damaged: {error}",
            where=str(adapter),
            do="name an adapter that was trained on this model",
        ) from error
    # PEFT passes over tensors that the model has no place for.
    lost = stored - get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    if lost:
        raise ConfigError(
            f"the adapter does not fit the model: {len(lost)} of its tensors have no place there, e.g. {min(lost)}",
            where=str(adapter),
            do="name an adapter that was trained on this model",
        )
    return loaded
