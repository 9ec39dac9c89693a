"""A model without numbers: the names and shapes of its modules, for checks before anything is loaded."""

from __future__ import annotations

from typing import Any

import torch

from cache.checkpoint import load_hf_config
from cache.config import ModelConfig
from cache.errors import ConfigError


def empty_model(model: ModelConfig) -> Any:
    """The stock model, tower included, on the meta device; only config.json is read.

    Raises:
        ConfigError: the config cannot be loaded or makes no model.
    """
    from transformers import AutoModelForImageTextToText

    config = load_hf_config(model)
    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(config)
    except (ValueError, KeyError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"its config.json makes no model: {error}",
            where=model.name_or_path,
            do="copy or download the checkpoint again, or use a model of the Qwen3-VL family",
        ) from error
