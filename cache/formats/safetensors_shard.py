"""safetensors shards: three tensors an entry, four where it is quantised. The default.

Format: https://github.com/huggingface/safetensors. Names: `<key>/image_embeds`, `<key>/deepstack_features`,
`<key>/image_grid_thw`, `<key>/scales`; see docs/cache-format.md.

The header stands before the tensors and is known after them: room is left for it, and filled with spaces.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from cache.features import SCALES, StoredFeatures
from cache.formats.base import NewShard, OutputFile, ShardFormat, ShardReader
from cache.formats.extents import FIELDS, KEY, EntryExtents, ShardFile, TensorExtent
from cache.formats.safetensors_header import MAX_HEADER_BYTES, read_header
from cache.formats.safetensors_layout import PAGE, described

METADATA = {"format": "pt"}
_LONGEST_NUMBER = 10**15
_LARGE = ("image_embeds", "deepstack_features")


class SafetensorsFormat(ShardFormat):
    """See the module's docstring."""

    name = "safetensors"
    suffix = ".safetensors"

    def create(self, path: Path, num_entries: int) -> NewShard:
        return _NewShard(path, num_entries)

    def open_file(self, file: ShardFile) -> ShardReader:
        return _Reader(file)


class _NewShard(NewShard):
    """Features go to the file as they come; grids and scales, which are small, behind the last of them."""

    def __init__(self, path: Path, num_entries: int) -> None:
        self._file = OutputFile(path)
        self._num_entries = num_entries
        self._header: dict[str, Any] = {"__metadata__": METADATA}
        self._header_bytes = len(_compact(self._header))
        self._room, self._data_bytes = 0, 0
        self._late: list[tuple[str, torch.Tensor]] = []

    def has_room(self, features: StoredFeatures) -> bool:
        # Before the first entry there is no telling how long the names of an entry are.
        return not self._room or self._header_bytes + _header_bytes_of(features) <= self._room

    def append(self, key: str, features: StoredFeatures) -> dict[str, int]:
        if not self._room:
            needed = 8 + self._header_bytes + self._num_entries * _header_bytes_of(features)
            self._room = min(-(-needed // PAGE) * PAGE, MAX_HEADER_BYTES // PAGE * PAGE) - 8
            self._file.leave_room(8 + self._room)
        offsets = {}
        for field, tensor in features.tensors().items():
            # The library wants a tensor to start at a multiple of its numbers' size, and holes are not allowed.
            if field in _LARGE and not tensor.nbytes % 8:
                offsets[field] = self._file.place
                self._add(f"{key}/{field}", tensor)
            else:
                self._late.append((f"{key}/{field}", tensor.clone()))
        self._header_bytes += _header_bytes_of(features)
        return offsets

    def finish(self) -> None:
        self._file.leave_room(0 if self._room else PAGE)
        self._room = self._room or PAGE - 8
        for name, tensor in sorted(self._late, key=lambda item: -item[1].dtype.itemsize):
            self._add(name, tensor)
        text = _compact(self._header)
        if len(text) > self._room:
            raise ValueError(f"a header of {len(text)} bytes was appended to a shard with room for {self._room}")
        self._file.write_at(0, self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.close()

    def abandon(self) -> None:
        self._file.close()

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self._header[name] = described(tensor, self._data_bytes)
        self._file.append_tensor(tensor)
        self._data_bytes += tensor.nbytes


def _header_bytes_of(features: StoredFeatures) -> int:
    """At least what an entry adds to the header."""
    names = {f"{'0' * 64}/{field}": described(tensor, _LONGEST_NUMBER) for field, tensor in features.tensors().items()}
    return len(_compact(names))


def _compact(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


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
