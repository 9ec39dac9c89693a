"""LoRA on the language model only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.errors import ConfigError
from train.adapter import CONFIG_FILE, WEIGHTS_FILE, require_adapter
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
    from peft import get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, _peft_config(model, config))


def continue_lora(model: Any, config: LoraConfig, adapter: Path, *, seed: int) -> Any:
    """Wrap a model in a PEFT model that goes on training a saved adapter, whose weights are taken exactly.

    Args:
        model: a stock model, with or without its tower.
        config: must give the adapter its rank, scale and modules; the dropout may be another.
        seed: of dropout before the first step; no weight is drawn.

    Raises:
        ConfigError: the folder holds no adapter, a damaged one, or one of another rank, scale or other modules.
    """
    require_adapter(adapter, "train the stage before first, or set train.adapter to an adapter's folder")
    wanted = _peft_config(model, config)
    differences = [*_other_settings(adapter, wanted), *_other_modules(model, adapter, wanted.target_modules)]
    if differences:
        raise ConfigError(
            "the adapter to start from is not as train.lora says:\n    " + "\n    ".join(differences),
            where=str(adapter),
            do="set train.lora to what the adapter has, or train.adapter: null to start afresh",
        )
    torch.manual_seed(seed)
    return _load(model, adapter, is_trainable=True, config=wanted)


def _peft_config(model: Any, config: LoraConfig) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import TaskType

    return PeftLoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type, unused-ignore]
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        target_modules=target_pattern(model, config),
        task_type=TaskType.CAUSAL_LM,
    )


def _other_settings(adapter: Path, wanted: Any) -> list[str]:
    """Settings in which a saved adapter differs from the wanted one and which decide what its weights mean."""
    try:
        there = json.loads((adapter / CONFIG_FILE).read_text(encoding="utf-8"))
        kind, given = there.get("peft_type"), {name: there.get(name) for name in ("r", "lora_alpha", "use_rslora")}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"is damaged: {error}", where=str(adapter / CONFIG_FILE), do="train the stage before again"
        ) from error
    differences = [] if kind == "LORA" else [f"peft_type: {kind!r} there, 'LORA' is needed"]
    # What this program never sets, and what would change the meaning of the weights if another one had.
    foreign = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "lora_bias")
    differences += [f"{name}: {there[name]!r} there, not supported here" for name in foreign if there.get(name)]
    return differences + [
        f"train.lora.{name}: {value!r} there, {getattr(wanted, name)!r} now"
        for name, value in given.items()
        if value != getattr(wanted, name)
    ]


def _other_modules(model: Any, adapter: Path, pattern: str) -> list[str]:
    """Modules that only the saved adapter or only the wanted one changes, by kind."""
    try:
        with safe_open(adapter / WEIGHTS_FILE, framework="pt") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"is damaged: {error}", where=str(adapter / WEIGHTS_FILE), do="train the stage before again"
        ) from error
    stored = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    wanted = {name for name, _ in model.named_modules() if re.fullmatch(pattern, name)}
    sides = (("the adapter alone", stored - wanted), ("train.lora alone", wanted - stored))
    return [
        f"train.lora.target_modules: {who} has {len(only)} modules: {', '.join(_kinds(only))}, e.g. {min(only)}"
        for who, only in sides
        if only
    ]


def _kinds(modules: set[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in modules})


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
    require_adapter(adapter, "train first, or name the adapter's folder with --adapter; --base leaves it out")
    return _load(model, adapter, is_trainable=False, config=None)


def _load(model: Any, adapter: Path, *, is_trainable: bool, config: Any) -> Any:
    """PEFT's own loader, which passes over tensors that the model has no place for; here that is an error."""
    from peft import PeftModel, get_peft_model_state_dict

    try:
        loaded = PeftModel.from_pretrained(model, str(adapter), is_trainable=is_trainable, config=config)
        with safe_open(adapter / WEIGHTS_FILE, framework="pt") as file:
            stored = set(file.keys())
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"the adapter does not fit the model, or is damaged: {error}",
            where=str(adapter),
            do="name an adapter that was trained on this model",
        ) from error
    lost = stored - get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    if lost:
        raise ConfigError(
            f"the adapter does not fit the model: {len(lost)} of its tensors have no place there, e.g. {min(lost)}",
            where=str(adapter),
            do="name an adapter that was trained on this model",
        )
    return loaded
