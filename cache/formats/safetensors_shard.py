"""safetensors shards: three tensors an entry, memory-mapped random access.

Format: https://github.com/huggingface/safetensors. Names: `<key>/image_embeds`, `<key>/deepstack_features`,
`<key>/image_grid_thw`; see docs/cache-format.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cache.features import VisionFeatures
from cache.formats.base import Entry, ShardFormat, ShardReader

FIELDS = ("image_embeds", "deepstack_features", "image_grid_thw")


class SafetensorsFormat(ShardFormat):
    """See the module's docstring."""

    name = "safetensors"
    suffix = ".safetensors"

    def write(self, path: Path, entries: Sequence[Entry]) -> None:
        try:
            save_file(_separate(entries), path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise _as_os_error(error, path) from error

    def open(self, path: Path) -> ShardReader:
        try:
            return _Reader(path)
        except SafetensorError as error:
            raise ValueError(f"is not a safetensors file: {error}") from error


class _Reader(ShardReader):
    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self._file, self._names = file, frozenset(file.keys())

    def keys(self) -> list[str]:
        return sorted(name.removesuffix("/image_embeds") for name in self._names if name.endswith("/image_embeds"))

    def read(self, key: str) -> VisionFeatures:
        names = [f"{key}/{field}" for field in FIELDS]
        if not self._names.issuperset(names):
            raise KeyError(key)
        try:
            return VisionFeatures(*(self._file.get_tensor(name) for name in names))
        except SafetensorError as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        del self._file


def _separate(entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
    """The tensors by name, as save_file takes them: contiguous, no two in one storage. Copies only where it must."""
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for key, features in entries:
        for field in FIELDS:
            tensor: torch.Tensor = getattr(features, field).contiguous()
            if tensor.untyped_storage().data_ptr() in storages:
                tensor = tensor.clone()
            storages.add(tensor.untyped_storage().data_ptr())
            tensors[f"{key}/{field}"] = tensor
    return tensors


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """The library tells the system's error number in its message only."""
    code = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1])), str(path)) if code else OSError(str(error))
