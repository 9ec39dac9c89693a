"""The index of a cache: key -> shard, grid and checksum, of a million images, without a Python object for each.

What counts is said by the JSON index of each shard. `entries.index` beside the manifest repeats all of them as
sorted arrays, so that a cache opens by reading one file; docs/cache-format.md is its specification. It is written at
the end of a caching run and stands for the shards whose JSON index still has the size and time that it was made from.
The other shards' JSON indexes are read. It may be removed at any time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache.atomic import TEMPORARY_MARK
from cache.documents import damaged_file
from cache.errors import CacheError, ResourceError
from cache.formats.extents import KEY
from cache.index_file import INDEX_FILE, read_index_file, write_index_file
from cache.index_table import KEY_BYTES, IndexTable, ShardStamp
from cache.manifest import SHARDS, check_shard_size, load_shard_index
from cache.split_images import Grid

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Location:
    """Where an entry lies. `checksum` is cache.formats.base.checksum of it, in hex."""

    shard: str
    image_grid_thw: Grid
    checksum: str


class EntryIndex:
    """The committed entries of a cache folder, as they were when it was opened."""

    def __init__(self, table: IndexTable) -> None:
        self._table = table

    @classmethod
    def open(cls, folder: Path) -> EntryIndex:
        """The entries of all committed shards. Looks at the shards' sizes, opens none.

        A damaged `entries.index` is reported by a warning in the log, and the JSON indexes are read instead.

        Raises:
            CacheError: a JSON index is damaged, or its shard is missing or has another size.
        """
        indexes, sizes = _list_shards(folder / SHARDS)
        known = _read(folder)
        fresh = [n for n, stamp in enumerate(known.stamps) if indexes.get(stamp.index) == _state(stamp)]
        # A key that several shards have stands once in the file. With one of these shards gone, another one has it.
        table = known if len(fresh) == len(known.stamps) else IndexTable.merged([])
        covered = {stamp.index for stamp in table.stamps}
        others = [_load(folder, name, indexes[name]) for name in sorted(indexes) if name not in covered]
        if others:
            table = IndexTable.merged([table, *others])
        for stamp in table.stamps:
            shard = folder / SHARDS / stamp.shard
            size = sizes[stamp.shard] if stamp.shard in sizes else _size(shard)
            check_shard_size(shard, size, stamp.num_bytes)
        return cls(table)

    @classmethod
    def read(cls, folder: Path) -> EntryIndex | None:
        """What `entries.index` says, believed: for where nothing else can be listed. None where there is no such file.

        Raises:
            ValueError, OSError: it is damaged, or cannot be read.
        """
        table = read_index_file(folder)
        return None if table is None else cls(table)

    def stamp_of(self, key: str) -> ShardStamp:
        """The shard of a key.

        Raises:
            KeyError: there is no such entry.
        """
        return self._table.stamps[int(self._table.shard[self._row(key)])]

    def stamps_of(self, keys: Sequence[str]) -> list[ShardStamp]:
        """The shards of so many keys, each once.

        Raises:
            KeyError: there is no entry of one of them.
        """
        rows = self._table.rows(keys)
        if (rows < 0).any():
            raise KeyError(keys[int(rows.argmin())])
        return [self._table.stamps[number] for number in np.unique(self._table.shard[rows]).tolist()]

    def missing(self, keys: Sequence[str]) -> list[int]:
        """The places, in `keys`, of those that there is no entry of; a million in about a second."""
        return np.flatnonzero(self._table.rows(keys) < 0).tolist()

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(stamp.num_bytes for stamp in self._table.stamps)

    def __len__(self) -> int:
        return len(self._table.keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and KEY.fullmatch(key) is not None and self._table.row(key) >= 0

    def __getitem__(self, key: str) -> Location:
        """Where the entry of a key lies.

        Raises:
            KeyError: there is no such entry.
        """
        row = self._row(key)
        t, h, w = self._table.grid[row].tolist()
        shard = self._table.stamps[int(self._table.shard[row])].shard
        return Location(shard, (t, h, w), self._table.checksum[row].tobytes().hex())

    def _row(self, key: str) -> int:
        row = self._table.row(key) if KEY.fullmatch(key) else -1
        if row < 0:
            raise KeyError(key)
        return row

    def keys(self) -> list[str]:
        """All keys, sorted: 113 bytes of Python object each, for caches that are not huge."""
        return list(self)

    def __iter__(self) -> Iterator[str]:
        """All keys, sorted."""
        digits = self._table.keys.tobytes().hex()
        width = 2 * KEY_BYTES
        return (digits[start : start + width] for start in range(0, len(digits), width))

    def by_shard(self) -> Iterator[tuple[str, list[str]]]:
        """File name of each shard with the keys that it gives, for reading shard after shard."""
        table = self._table
        order = table.shard.argsort(kind="stable")
        bounds = table.shard[order].searchsorted(range(len(table.stamps) + 1))
        for number, stamp in enumerate(table.stamps):
            digits = table.keys[order[bounds[number] : bounds[number + 1]]].tobytes().hex()
            width = 2 * KEY_BYTES
            yield stamp.shard, [digits[start : start + width] for start in range(0, len(digits), width)]

    def save(self, folder: Path) -> None:
        """Write `entries.index`.

        Raises:
            ResourceError: the disk is full.
            OSError: it cannot be written.
        """
        write_index_file(folder, self._table)


def update_index_file(folder: Path) -> None:
    """Make `entries.index` cover every committed shard. A failure is logged: here only speed depends on it.

    Where a cache lies at an address (cache.remote), it holds what that file says; so this is called even if nothing was
    committed, and leaves a file that is up to date as it is.
    """
    try:
        stamps = {stamp.index: _state(stamp) for stamp in _read(folder).stamps}
        if stamps != _list_shards(folder / SHARDS)[0]:
            EntryIndex.open(folder).save(folder)
    except (CacheError, ResourceError, OSError) as error:
        _log.warning("%s is not brought up to date, opening the cache takes longer: %s", folder / INDEX_FILE, error)


def index_file_damage(folder: Path) -> str | None:
    """What is wrong with `entries.index`; None when it is intact or not there."""
    try:
        read_index_file(folder)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _read(folder: Path) -> IndexTable:
    try:
        return read_index_file(folder) or IndexTable.merged([])
    except (ValueError, OSError) as error:
        _log.warning(
            "%s is damaged (%s) and not used; the shards' own indexes are read instead. "
            "Remove it: the next `pipeline cache` that stores something writes it anew",
            folder / INDEX_FILE,
            error,
        )
        return IndexTable.merged([])


def _list_shards(folder: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """Size and time of each JSON index, and size of every other file that is not temporary, by file name."""
    indexes: dict[str, tuple[int, int]] = {}
    sizes: dict[str, int] = {}
    try:
        listing = os.scandir(folder)
    except FileNotFoundError:
        return indexes, sizes  # nothing has been committed yet
    with listing as entries:
        for entry in entries:
            if TEMPORARY_MARK in entry.name or not entry.is_file():
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # a repair has moved it aside meanwhile; that says nothing about those after it
                continue
            if entry.name.endswith(".json"):
                indexes[entry.name] = status.st_size, status.st_mtime_ns
            else:
                sizes[entry.name] = status.st_size
    return indexes, sizes


def _size(shard: Path) -> int | None:
    """Of a shard that the listing lacks: one committed while it was made can be left out though its index is in."""
    try:
        return shard.stat().st_size
    except FileNotFoundError:
        return None


def _state(stamp: ShardStamp) -> tuple[int, int]:
    return stamp.index_bytes, stamp.index_mtime_ns


def _load(folder: Path, name: str, state: tuple[int, int]) -> IndexTable:
    path = folder / SHARDS / name
    index = load_shard_index(path)
    stamp = ShardStamp(name, index.shard, index.num_bytes, *state)
    try:
        return IndexTable.of_entries(stamp, index.entries)
    except ValueError as error:
        raise damaged_file(path, str(error)) from error
