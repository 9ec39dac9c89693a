"""safetensors shards: three tensors an entry, memory-mapped random access.

Format: https://github.com/huggingface/safetensors. Names: `<key>/image_embeds`, `<key>/deepstack_features`,
`<key>/image_grid_thw`; see docs/cache-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        # A slice shares its storage with its neighbours, and save_file refuses that: contiguous copies only.
        tensors = {
            f"{key}/{field}": getattr(features, field).contiguous() for key, features in entries for field in FIELDS
        }
        save_file(tensors, path, metadata={"format": "pt"})

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
