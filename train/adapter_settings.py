"""What a saved adapter's adapter_config.json says beyond plain LoRA: what works under which base, and what is refused.

Each verdict was tried against PEFT's own training and loading, see tests/train/test_adapter_settings.py. A setting that
this program does not know is refused: PEFT passes over one that it does not know, and the adapter means something else.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal

from cache.errors import ConfigError
from train.adapter import CONFIG_FILE, require_adapter

Base = Literal["none", "nf4", "fp8"]
Settings = dict[str, Any]

# Rank, scale and modules, which PEFT's loader goes by; what only mattered in its training; what only describes it.
_PLAIN = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "trainable_token_indices", "lora_dropout", "bias"),
    *("eva_config", "ensure_weight_tying", "megatron_core", "qalora_group_size", "fan_in_fan_out"),
    *("peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "runtime_config", "init_lora_weights"),
}
# How the weights began, where that is of no interest once they are loaded.
_DRAWN = (True, False, None, "gaussian", "eva")
# These change the base at load, by a decomposition that comes out the same every time (pissa_niter_N is random), or are
# drawn by one; either needs the base's weights as plain numbers.
_DECOMPOSED = ("pissa", "olora", "orthogonal", "mica")
_CONVERT = (
    "save it as plain LoRA where it was trained: save_pretrained(folder, path_initial_model_for_weight_conversion=...)"
)
_PLAIN_BASE = "set train.quantization: none"
_WITH_PEFT = "use it with PEFT itself, or train an adapter without that setting"
# What goes on as the same training: nothing else than rank, scale and modules, which are compared with train.lora.
_CONTINUED = _PLAIN - {"rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices", "bias"}


def read_settings(adapter: Path) -> Settings:
    """The content of adapter_config.json.

    Raises:
        ConfigError: it cannot be read or is no JSON object.
    """
    file = adapter / CONFIG_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"is damaged: {error}", where=str(file), do="copy or train the adapter again") from error
    return content


def require_usable(adapter: Path, base: Base, advice: str, *, merging: bool = False) -> None:
    """Check that a folder holds an adapter whose settings work as in PEFT when it is loaded.

    Args:
        base: how the base is quantized.
        advice: what to do where there is no adapter.
        merging: it is to be merged into the base.

    Raises:
        ConfigError: there is no adapter, or one with a setting that does not work; names setting and file.
    """
    require_adapter(adapter, advice)
    settings = read_settings(adapter)
    for what, do in (_kind(settings), _start(settings, base), *_variants(settings, base), *_merged(settings, merging)):
        if what:
            raise ConfigError(what, where=str(adapter / CONFIG_FILE), do=do)


def not_continued(settings: Settings) -> list[str]:
    """Settings under which training the adapter further here would not be the training that it began with."""
    kind = settings.get("peft_type")
    found = [] if kind == "LORA" else [f"peft_type: {kind!r} there, 'LORA' is needed"]
    foreign = {
        name: value for name, value in settings.items() if name not in _CONTINUED and not _is_neutral(name, value)
    }
    start = settings.get("init_lora_weights")
    if start not in (*_DRAWN, "orthogonal"):  # they moved a part of the base into the adapter
        foreign["init_lora_weights"] = start
    return found + [f"{name}: {value!r} there, not supported here" for name, value in foreign.items()]


_Finding = tuple[str, str]
_NONE: _Finding = ("", "")


def _kind(settings: Settings) -> _Finding:
    kind = settings.get("peft_type")
    return (f"peft_type: {kind!r} is no LoRA, and only LoRA is supported", _WITH_PEFT) if kind != "LORA" else _NONE


def _start(settings: Settings, base: Base) -> _Finding:
    start = settings.get("init_lora_weights")
    if start in _DRAWN:
        return _NONE
    if start not in _DECOMPOSED:
        what = f"init_lora_weights: {start!r} changed the base's weights, in a way that loading does not repeat"
        return what, _CONVERT
    if base == "none" or (base, start) == ("nf4", "olora"):
        return _NONE
    return f"init_lora_weights: {start!r} does not go with a base in {base}", f"{_PLAIN_BASE}, or {_CONVERT}"


def _variants(settings: Settings, base: Base) -> list[_Finding]:
    works_on = {"use_dora": ("none", "nf4"), "target_parameters": ("none", "nf4"), "velora_config": ("none", "fp8")}
    found = []
    for name, value in settings.items():
        if name in {*_PLAIN, "loftq_config", "lora_bias"} or _is_neutral(name, value):
            continue
        if name not in works_on:
            found.append((f"{name}: {value!r} is not supported here", _WITH_PEFT))
        elif base not in works_on[name]:
            found.append((f"{name}: {value!r} does not go with a base in {base}", _PLAIN_BASE))
    return found


def _merged(settings: Settings, merging: bool) -> list[_Finding]:
    if not (merging and settings.get("lora_bias")):
        return []
    return [("lora_bias: True cannot be merged: the model's layers have no bias", "use the adapter without merging it")]


def _is_neutral(name: str, value: object) -> bool:
    """As PEFT writes a setting that is off; a later version may have some that this program does not know."""
    return not value or value == "none" or (name in (defaults := _defaults()) and defaults[name] == value)


@functools.cache
def _defaults() -> Settings:
    from peft import LoraConfig

    defaults: Settings = LoraConfig().to_dict()
    return defaults
