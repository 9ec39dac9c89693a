"""LoRA on the language model only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.errors import ConfigError
from train.adapter import NO_ADAPTER, WEIGHTS_FILE, require_adapter
from train.adapter_settings import not_continued, read_settings
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
    wanted = require_same(model, config, adapter)
    torch.manual_seed(seed)
    return _load(model, adapter, is_trainable=True, config=wanted)


def require_same(model: Any, config: LoraConfig, adapter: Path) -> Any:
    """Check that a saved adapter is what the settings would make of a model; their PEFT config.

    Args:
        model: may be on the meta device: only names and shapes are looked at.

    Raises:
        ConfigError: the folder's adapter has another rank or scale, other modules or widths, or is damaged.
    """
    wanted = _peft_config(model, config)
    differences = [*_other_settings(adapter, wanted), *_other_modules(model, adapter, wanted.target_modules)]
    if differences:
        raise ConfigError(
            "the adapter to start from is not as train.lora says:\n    " + "\n    ".join(differences),
            where=str(adapter),
            do="set train.lora to what the adapter has, or train.adapter: null to start afresh",
        )
    return wanted


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
    there = read_settings(adapter)
    return not_continued(there) + [
        f"train.lora.{name}: {there.get(name)!r} there, {getattr(wanted, name)!r} now"
        for name in ("r", "lora_alpha", "use_rslora")
        if there.get(name) != getattr(wanted, name)
    ]


def _other_modules(model: Any, adapter: Path, pattern: str) -> list[str]:
    """Modules that only the saved adapter or only the wanted one changes, by kind, and those of other widths."""
    stored = _stored_widths(adapter)
    wanted = {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if re.fullmatch(pattern, name)
    }
    sides = (("the adapter alone", stored.keys() - wanted), ("train.lora alone", wanted.keys() - stored))
    other = [name for name in sorted(stored.keys() & wanted) if stored[name] != wanted[name]]
    return [
        f"train.lora.target_modules: {who} has {len(only)} modules: {', '.join(_kinds(only))}, e.g. {min(only)}"
        for who, only in sides
        if only
    ] + [f"{name} is {stored[name]} wide there, {wanted[name]} here: it is another model's" for name in other[:1]]


def _stored_widths(adapter: Path) -> dict[str, tuple[int, int]]:
    """Module -> the widths (in, out) that its adapter was made for, -1 where there is no such matrix."""
    found: dict[str, tuple[int, int]] = {}
    try:
        with safe_open(adapter / WEIGHTS_FILE, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                module, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
                shape = file.get_slice(name).get_shape()
                before = found.get(module, (-1, -1))
                found[module] = (shape[-1], before[1]) if rest.startswith("A") else (before[0], shape[0])
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"is damaged: {error}", where=str(adapter / WEIGHTS_FILE), do="train the stage before again"
        ) from error
    return found


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
    require_adapter(adapter, NO_ADAPTER)
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
    if lost and all(".visual." in name for name in lost):
        raise ConfigError(
            f"the adapter changes the vision tower, e.g. {min(lost)}; the features are those of the unchanged one",
            where=str(adapter),
            do="ask the whole model with `pipeline predict`, or name an adapter of the language model alone",
        )
    if lost:
        raise ConfigError(
            f"the adapter does not fit the model: {len(lost)} of its tensors have no place there, e.g. {min(lost)}",
            where=str(adapter),
            do="name an adapter that was trained on this model",
        )
    return loaded
