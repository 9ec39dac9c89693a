"""Finds a checkpoint's files and reads single tensors of it, from a folder or from the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache.config import ModelConfig
from cache.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
VISION_PREFIXES = ("model.visual.", "visual.")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The tower's tensors inside a checkpoint.

    Attributes:
        files: name of each tensor within the tower (prefix removed) -> (file, name in that file).
    """

    files: dict[str, tuple[Path, str]]

    @classmethod
    def find(cls, model: ModelConfig) -> VisionWeights:
        """Locate the tower's tensors; from the hub only the files that hold some of them are fetched.

        Raises:
            ConfigError: there is no such checkpoint, it has no safetensors weights, or no vision tower.
        """
        found = {
            name[len(prefix) :]: (file, name)
            for name, file in weight_map(model)
            for prefix in VISION_PREFIXES
            if name.startswith(prefix)
        }
        if not found:
            raise ConfigError(
                "the checkpoint has no vision tower (no tensor begins with model.visual.)",
                where=model.name_or_path,
                do="use a model of the Qwen3-VL family",
            )
        # Each file once: on the hub every look costs a request.
        paths = {file: fetch_file(model, file) for file in sorted({file for file, _ in found.values()})}
        return cls({name: (paths[file], key) for name, (file, key) in sorted(found.items())})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each tensor in the order of names; one is in memory at a time.

        Raises:
            ConfigError: a file is damaged or lacks a tensor that the index promises.
        """
        by_file: dict[Path, Any] = {}
        for name, (path, key) in self.files.items():
            try:
                if path not in by_file:
                    by_file[path] = safe_open(path, framework="pt")
                tensor = by_file[path].get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise _damaged(path, error) from error
            yield name, tensor

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes, in hex. Reads the tensors but builds nothing."""
        total = hashlib.sha256()
        for name, tensor in self.tensors():
            total.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return total.hexdigest()


def load_hf_config(model: ModelConfig) -> Any:
    """The checkpoint's transformers config.

    Raises:
        ConfigError: it cannot be loaded or describes no model with a vision tower and DeepStack levels.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _require_place(model)
    try:
        config = AutoConfig.from_pretrained(model.name_or_path, revision=model.revision, trust_remote_code=False)
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"cannot load the model's config: {_first_line(error)}",
            where=model.name_or_path,
            do="`model` must be a checkpoint folder or a hub id; gated models need `hf auth login`",
        ) from error
    vision = getattr(config, "vision_config", None)
    if vision is None or not hasattr(vision, "deepstack_visual_indexes"):
        raise ConfigError(
            f"a {config.model_type} model has no vision tower with DeepStack levels",
            where=model.name_or_path,
            do="use a model of the Qwen3-VL family",
        )
    return config


def fetch_file(model: ModelConfig, name: str) -> Path:
    """The local path of one file of the checkpoint, fetched from the hub where that is needed.

    Raises:
        ConfigError: there is no such file.
    """
    path = fetch_optional(model, name)
    if path is None:
        raise ConfigError(
            f"the checkpoint has no file {name}", where=model.name_or_path, do="copy or download the checkpoint again"
        )
    return path


def weight_map(model: ModelConfig) -> list[tuple[str, str]]:
    """(tensor name, file name) of the whole checkpoint.

    Raises:
        ConfigError: it has no safetensors weights, or their list is damaged.
    """
    index = fetch_optional(model, INDEX_FILE)
    if index is not None:
        try:
            weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = set(weights.values())
            outside = sorted(file for file in files if Path(file).name != file)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"is not a weight index: {error}", where=str(index), do="copy or download the file again"
            ) from error
        if outside:
            raise ConfigError(
                f"names a file outside its folder: {outside[0]}", where=str(index), do="use a checkpoint that you trust"
            )
        return list(weights.items())
    single = fetch_optional(model, SINGLE_FILE)
    if single is None:
        raise ConfigError(
            f"there is neither {INDEX_FILE} nor {SINGLE_FILE}",
            where=model.name_or_path,
            do="only safetensors weights are read; pickled .bin files never are",
        )
    try:
        with safe_open(single, framework="pt") as file:
            return [(name, SINGLE_FILE) for name in file.keys()]  # noqa: SIM118  (safe_open is not a mapping)
    except (SafetensorError, OSError) as error:
        raise _damaged(single, error) from error


def fetch_optional(model: ModelConfig, name: str) -> Path | None:
    """The local path of one file of the checkpoint; None when it has no such file."""
    folder = Path(model.name_or_path)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    _require_place(model)
    from transformers.utils import cached_file

    try:
        found = cached_file(
            model.name_or_path, name, revision=model.revision, _raise_exceptions_for_missing_entries=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"is neither a folder nor a reachable hub model: {_first_line(error)}",
            where=model.name_or_path,
            do="`model` must be a checkpoint folder or a hub id; gated models need `hf auth login`",
        ) from error
    return Path(found) if found is not None else None


def _require_place(model: ModelConfig) -> None:
    """Refuse what is no folder here and no hub id either, which the hub's library would look up for half a minute."""
    folder = Path(model.name_or_path)
    if not folder.is_dir() and not _HUB_ID.fullmatch(model.name_or_path):
        raise ConfigError(
            f"there is no such folder (looked for {folder.absolute()}), and it cannot be a hub id",
            where=model.name_or_path,
            do="set `model` to a checkpoint folder, or to a hub id such as Qwen/Qwen3-VL-8B-Instruct",
        )


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the weights cannot be read: {_first_line(error)}", where=str(path), do="copy or download the file again"
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).strip().split("\n", 2)[:2])
