"""`entries.index`, a safetensors file: the index of a whole cache folder. docs/cache-format.md is its specification."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import save

from cache.atomic import write_atomically
from cache.formats.extents import ShardFile
from cache.formats.safetensors_header import read_header
from cache.index_table import CHECKSUM_BYTES, KEY_BYTES, IndexTable, ShardStamp

INDEX_FILE = "entries.index"  # not *.safetensors: it is no shard
METADATA = {"format": "vision-once index", "version": "1"}
_FIELDS = ("checksum", "grid", "keys", "shard", "stamps")  # in this order under the digest
_DTYPES = {"grid": torch.int32, "shard": torch.int32}
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)


def write_index_file(folder: Path, table: IndexTable) -> None:
    """Write the index file of a cache folder in one step.

    Raises:
        ResourceError: the disk is full.
        OSError: it cannot be written.
    """
    stamps = [[s.index, s.shard, s.num_bytes, s.index_bytes, s.index_mtime_ns] for s in table.stamps]
    arrays = {
        "checksum": table.checksum,
        "grid": table.grid,
        "keys": np.frombuffer(table.keys.tobytes(), dtype=np.uint8).reshape(-1, KEY_BYTES),
        "shard": table.shard,
        "stamps": np.frombuffer(json.dumps(stamps, separators=(",", ":")).encode(), dtype=np.uint8),
    }
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    tensors["digest"] = torch.tensor(list(_digest(tensors)), dtype=torch.uint8)
    content = save(tensors, METADATA)  # not save_file: it hides why it fails
    write_atomically(folder / INDEX_FILE, lambda path: path.write_bytes(content))


def read_index_file(folder: Path) -> IndexTable | None:
    """The index file's content; None where there is no such file.

    It is read, not mapped: a file that is cut while it is mapped ends the process.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        file = ShardFile(folder / INDEX_FILE)
    except FileNotFoundError:
        return None
    try:
        tensors = _read_tensors(file)
    finally:
        file.close()
    stamps = _stamps(tensors["stamps"].numpy().tobytes())
    keys = tensors["keys"].numpy().reshape(-1).view(f"S{KEY_BYTES}")
    shard, grid = tensors["shard"].numpy(), tensors["grid"].numpy()
    if len(shard) and not 0 <= shard.min() <= shard.max() < len(stamps):
        raise ValueError("an entry lies in a shard that is not listed")
    if not (keys[1:] > keys[:-1]).all():
        raise ValueError("its keys are not sorted")
    return IndexTable(stamps, keys, shard, grid, tensors["checksum"].numpy())


def _read_tensors(file: ShardFile) -> dict[str, torch.Tensor]:
    extents = read_header(file, 0, file.size, METADATA)
    if extents.keys() != {*_FIELDS, "digest"}:
        raise ValueError("it holds other tensors than an index does")
    count = extents["shard"].shape[:1]
    shapes = {"checksum": (*count, CHECKSUM_BYTES), "grid": (*count, 3), "keys": (*count, KEY_BYTES), "shard": count}
    shapes |= {"digest": (16,), "stamps": extents["stamps"].shape[:1]}
    tensors = {}
    for name, extent in extents.items():
        if len(count) != 1 or extent.shape != shapes[name] or extent.dtype != _DTYPES.get(name, torch.uint8):
            raise ValueError(f"{name} is {extent.dtype} {extent.shape}")
        tensor = tensors[name] = torch.empty(extent.shape, dtype=extent.dtype)
        file.fill(tensor.numpy().reshape(-1).view(np.uint8).data, extent.offset)
    if tensors["digest"].numpy().tobytes() != _digest(tensors):
        raise ValueError("its content does not match its digest")
    return tensors


def _digest(tensors: dict[str, torch.Tensor]) -> bytes:
    total = xxhash.xxh3_128()
    for name in _FIELDS:
        # By way of NumPy: torch views no empty tensor of another width as bytes, and a cache may have no entry.
        total.update(tensors[name].numpy().reshape(-1).view(np.uint8).data)
    return total.digest()


def _stamps(text: bytes) -> tuple[ShardStamp, ...]:
    try:
        rows = json.loads(text)
        stamps = tuple(ShardStamp(*row) for row in rows)
    except (TypeError, RecursionError) as error:
        raise ValueError("its list of shards cannot be read") from error
    for stamp in stamps:
        names, numbers = (stamp.index, stamp.shard), (stamp.num_bytes, stamp.index_bytes, stamp.index_mtime_ns)
        named = all(type(name) is str and _FILE_NAME.fullmatch(name) for name in names)
        if not named or not all(type(number) is int for number in numbers):
            raise ValueError("its list of shards cannot be read")
    return stamps
