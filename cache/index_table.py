"""Entries of many shards as sorted arrays: 64 bytes an entry, found by binary search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.manifest import IndexEntry

KEY_BYTES, CHECKSUM_BYTES = 32, 16


@dataclass(frozen=True, slots=True)
class ShardStamp:
    """A shard, and what its JSON index looked like when its entries were taken from it.

    Attributes:
        index: file name of the JSON index.
        shard: file name of the shard.
        num_bytes: the shard's size.
        index_bytes, index_mtime_ns: size and modification time of the JSON index.
    """

    index: str
    shard: str
    num_bytes: int
    index_bytes: int
    index_mtime_ns: int


@dataclass(frozen=True, slots=True)
class IndexTable:
    """Entries, sorted by key, no key twice (but for one that `of_entries` made, until it is merged).

    Attributes:
        keys: (n,) fixed-width bytes, the keys' 32 bytes.
        shard: (n,) int32, the entry's place in `stamps`.
        grid: (n, 3) int32.
        checksum: (n, 16) uint8.
    """

    stamps: tuple[ShardStamp, ...]
    keys: npt.NDArray[np.bytes_]
    shard: npt.NDArray[np.int32]
    grid: npt.NDArray[np.int32]
    checksum: npt.NDArray[np.uint8]

    @classmethod
    def of_entries(cls, stamp: ShardStamp, entries: Sequence[IndexEntry]) -> IndexTable:
        """The entries of one shard, in any order.

        Raises:
            ValueError: a checksum or a grid cannot be.
        """
        try:
            sums = bytes.fromhex("".join(entry.checksum for entry in entries))
            grid = np.array([entry.image_grid_thw for entry in entries], dtype=np.int32).reshape(-1, 3)
        except OverflowError as error:
            raise ValueError("image_grid_thw is larger than any image's") from error
        if any(len(entry.checksum) != 2 * CHECKSUM_BYTES for entry in entries):
            raise ValueError("a checksum does not have 32 hex digits")
        raw = b"".join(bytes.fromhex(entry.key) for entry in entries)
        return cls(
            stamps=(stamp,),
            keys=np.frombuffer(raw, dtype=f"S{KEY_BYTES}"),
            shard=np.zeros(len(entries), dtype=np.int32),
            grid=grid,
            checksum=np.frombuffer(sums, dtype=np.uint8).reshape(-1, CHECKSUM_BYTES),
        )

    @classmethod
    def merged(cls, tables: Sequence[IndexTable]) -> IndexTable:
        """The entries of all tables. Of a key in several shards, the shard whose name sorts last has it."""
        stamps = [stamp for table in tables for stamp in table.stamps]
        starts = np.cumsum([0, *(len(table.stamps) for table in tables)])
        order = sorted(range(len(stamps)), key=lambda n: stamps[n].shard)
        rank = np.empty(len(stamps), dtype=np.int32)
        rank[order] = np.arange(len(stamps), dtype=np.int32)
        empty = np.empty(0, dtype=np.int32)
        shard = np.concatenate([empty, *(rank[t.shard + s] for t, s in zip(tables, starts[:-1], strict=True))])
        keys = np.concatenate([np.empty(0, f"S{KEY_BYTES}"), *(table.keys for table in tables)])
        by_key = np.lexsort((shard, keys))
        ordered = keys[by_key]
        last = np.ones(len(ordered), dtype=np.bool_)
        last[:-1] = ordered[1:] != ordered[:-1]
        by_key = by_key[last]
        return cls(
            stamps=tuple(stamps[n] for n in order),
            keys=keys[by_key],
            shard=shard[by_key],
            grid=np.concatenate([empty.reshape(0, 3), *(table.grid for table in tables)])[by_key],
            checksum=np.concatenate([np.empty((0, CHECKSUM_BYTES), np.uint8), *(t.checksum for t in tables)])[by_key],
        )

    def row(self, key: str) -> int:
        """The row of a key of 64 hex digits; -1 if there is none."""
        raw = bytes.fromhex(key)
        row = int(self.keys.searchsorted(np.frombuffer(raw, dtype=self.keys.dtype)[0]))
        found = row < len(self.keys) and self.keys[row : row + 1].tobytes() == raw
        return row if found else -1

    def rows(self, keys: Sequence[str]) -> npt.NDArray[np.intp]:
        """The row of each key of 64 hex digits; -1 for those that there are none of."""
        wanted = np.frombuffer(bytes.fromhex("".join(keys)), dtype=self.keys.dtype)
        if not len(self.keys):
            return np.full(len(wanted), -1)
        order = wanted.argsort()  # in order, one search begins where the one before it ended: four times as fast
        rows = np.empty(len(wanted), dtype=np.intp)
        rows[order] = self.keys.searchsorted(wanted[order])
        found = self.keys[np.minimum(rows, len(self.keys) - 1)] == wanted
        return np.where(found, rows, -1)
