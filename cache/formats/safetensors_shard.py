"""safetensors shards: three tensors an entry, four where it is quantised. The default.

Format: https://github.com/huggingface/safetensors. Names: `<key>/image_embeds`, `<key>/deepstack_features`,
`<key>/image_grid_thw`, `<key>/scales`; see docs/cache-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cache.features import SCALES
from cache.formats.base import Entry, ShardFormat, ShardReader, new_file
from cache.formats.extents import FIELDS, KEY, EntryExtents, ShardFile, TensorExtent
from cache.formats.safetensors_header import read_header
from cache.formats.safetensors_layout import SafetensorsLayout

METADATA = {"format": "pt"}


class SafetensorsFormat(ShardFormat):
    """See the module's docstring."""

    name = "safetensors"
    suffix = ".safetensors"

    def write(self, path: Path, entries: Sequence[Entry]) -> None:
        tensors = {f"{key}/{field}": t for key, features in entries for field, t in features.tensors().items()}
        with new_file(path) as file:
            SafetensorsLayout(tensors, 0, METADATA).write(file)

    def open_file(self, file: ShardFile) -> ShardReader:
        return _Reader(file)


class _Reader(ShardReader):
    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        self._entries = entries_of(read_header(file, 0, file.size, METADATA))

    def keys(self) -> list[str]:
        return sorted(self._entries)

    def extents(self, key: str) -> EntryExtents:
        return self._entries[key]


def entries_of(tensors: dict[str, TensorExtent]) -> dict[str, EntryExtents]:
    """Tensors by `<key>/<field>` -> entries by key.

    Raises:
        ValueError: a name is not of this kind, or an entry is not complete.
    """
    found: dict[str, dict[str, TensorExtent]] = {}
    for name, extent in tensors.items():
        key, _, field = name.partition("/")
        if not KEY.fullmatch(key) or field not in (*FIELDS, SCALES):
            raise ValueError(f"tensor {name[:100]!r} does not belong into a shard")
        found.setdefault(key, {})[field] = extent
    for key, fields in found.items():
        if not fields.keys() >= set(FIELDS):
            raise ValueError(f"entry {key[:12]}... has {', '.join(fields)} only")
    return {key: EntryExtents(**fields) for key, fields in found.items()}
