"""An adapter merged into a full checkpoint that the stock class loads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from cache.checkpoint import fetch_optional
from cache.config import ModelConfig
from cache.errors import ConfigError
from train.adapter import NO_ADAPTER
from train.adapter_settings import require_usable
from train.config import TrainConfig
from train.hub import push, require_repository_name
from train.lora import load_adapter
from train.model import load_full_model, training_device
from train.run_folder import save_folder

# What a checkpoint holds besides weights and config.json, which the model writes itself.
COMPANION_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)


def merge(model: ModelConfig, train: TrainConfig, *, adapter: Path, output: Path, push_to_hub: str | None) -> Path:
    """Merge and save; the tower's weights are those of the checkpoint, bit for bit.

    The base is loaded in `train.precision`, never quantized: merging into 4 bits would round the adapter away.

    Args:
        output: a folder that does not exist yet.
        push_to_hub: repository to upload the merged folder to, made private if it is new, with the Hub client's own
            credentials.

    Raises:
        ConfigError: `output` exists, model or adapter cannot be loaded, or the Hub refuses, and the folder stays.
    """
    if output.exists():
        raise ConfigError("exists already", where=str(output), do="give another --output; nothing is overwritten")
    require_usable(adapter, "none", NO_ADAPTER, merging=True)
    if push_to_hub is not None:
        require_repository_name(push_to_hub)
    base = load_full_model(model, train.model_copy(update={"quantization": "none"}), training_device(train))
    merged = load_adapter(base, adapter).merge_and_unload()
    save_folder(output, lambda folder: _save(merged, model, folder))
    if push_to_hub is not None:
        push(output, push_to_hub)
    return output


def _save(merged: Any, model: ModelConfig, folder: Path) -> None:
    merged.save_pretrained(str(folder))
    for name in COMPANION_FILES:
        found = fetch_optional(model, name)
        if found is not None:
            shutil.copyfile(found, folder / name)
