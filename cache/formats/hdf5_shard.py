"""HDF5 shards: a group an entry, named by its key, with three contiguous datasets in it, four where quantised.

Format: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html; see docs/cache-format.md. The library lays
out the file; the features' bytes are written into the space it reserved and read from there without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from cache.features import SCALES, StoredFeatures
from cache.formats.base import NewShard, ShardFormat, ShardReader, bytes_of, write_at
from cache.formats.extents import FIELDS, KEY, EntryExtents, ShardFile
from cache.formats.hdf5_structure import dataset, members, root_group

ALIGNMENT = 4096  # of datasets of at least this size; a page, so that direct I/O is possible


class Hdf5Format(ShardFormat):
    """See the module's docstring."""

    name = "hdf5"
    suffix = ".h5"

    def create(self, path: Path, num_entries: int) -> NewShard:  # noqa: ARG002  (no room is set aside)
        return _NewShard(path)

    def open_file(self, file: ShardFile) -> ShardReader:
        return _Reader(file)


class _NewShard(NewShard):
    """The library keeps the structure and never sees the features."""

    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        path.touch(exist_ok=False)
        with _os_errors(path):
            self._structure = h5py.File(
                path, "w", libver="earliest", locking=False, alignment_threshold=ALIGNMENT, alignment_interval=ALIGNMENT
            )
        self._file = path.open("r+b", buffering=0)

    def append(self, key: str, features: StoredFeatures) -> dict[str, int]:
        with _os_errors(self._path):
            group = self._structure.create_group(key, track_order=False)
            tensors = features.tensors()
            reserved = {field: _reserve(group, field, tensor) for field, tensor in tensors.items()}
            offsets = {field: place for field, place in reserved.items() if place is not None}
            for field, place in offsets.items():
                # Takes the space now: a full disk is met here, as a plain error, before anything is written.
                os.posix_fallocate(self._file.fileno(), place, tensors[field].nbytes)
                write_at(self._file.fileno(), place, bytes_of(tensors[field]))
        return offsets

    def finish(self) -> None:
        with _os_errors(self._path):
            self._structure.close()
        self._file.close()

    def abandon(self) -> None:
        # On a full disk the library could not close its file, and would keep it for ever.
        os.truncate(self._path, 0)
        with suppress(OSError, RuntimeError, ValueError):
            self._structure.close()
        self._file.close()


class _Reader(ShardReader):
    """Knows the groups; an entry's datasets are looked up with the entry."""

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        self._groups = members(file, root_group(file))
        for key in self._groups:
            if not KEY.fullmatch(key):
                raise ValueError(f"group {key[:100]!r} does not belong into a shard")
        self._known: dict[str, EntryExtents] = {}

    def keys(self) -> list[str]:
        return sorted(self._groups)

    def extents(self, key: str) -> EntryExtents:
        known = self._known.get(key)
        if known is None:
            datasets = members(self._file, self._groups[key])
            if datasets.keys() - {SCALES} != set(FIELDS):
                raise ValueError(f"group {key[:12]}... holds other datasets than {', '.join(FIELDS)}")
            known = EntryExtents(**{field: dataset(self._file, at) for field, at in datasets.items()})
            self._known[key] = known
        return known


def _reserve(group: Any, field: str, tensor: torch.Tensor) -> int | None:
    """Create a contiguous dataset for a tensor; returns where its bytes belong, None if it has none."""
    from h5py import Dataset, h5d, h5p, h5s, h5t

    kinds = {
        torch.bfloat16: h5t.STD_U16LE,
        torch.float16: h5t.IEEE_F16LE,
        torch.float32: h5t.IEEE_F32LE,
        torch.float8_e4m3fn: h5t.STD_U8LE,
        torch.int8: h5t.STD_I8LE,
        torch.int64: h5t.STD_I64LE,
    }
    plan = h5p.create(h5p.DATASET_CREATE)
    plan.set_layout(h5d.CONTIGUOUS)
    plan.set_alloc_time(h5d.ALLOC_TIME_EARLY)  # else there is no offset before the library has written something
    plan.set_fill_time(h5d.FILL_TIME_NEVER)
    plan.set_obj_track_times(False)  # equal entries give equal files
    made = h5d.create(group.id, field.encode(), kinds[tensor.dtype], h5s.create_simple(tuple(tensor.shape)), plan)
    if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn):  # HDF5 has no such types: the bits stand as unsigned
        Dataset(made).attrs["dtype"] = str(tensor.dtype).removeprefix("torch.")
    offset: int | None = made.get_offset()
    return offset


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """What the library raises, as the system's error; it tells the number in its message only."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        code = re.search(r"errno = (\d+)", str(error))
        if isinstance(error, OSError) and error.errno is not None and code is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) if code else OSError(str(error)) from error
