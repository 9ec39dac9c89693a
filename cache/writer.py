"""Collects features and commits them shard by shard."""

from __future__ import annotations

import secrets
from pathlib import Path

from cache.atomic import write_atomically
from cache.features import VisionFeatures
from cache.formats import Entry, ShardFormat
from cache.formats.base import checksum
from cache.manifest import SHARDS, IndexEntry, ShardIndex, save_shard_index


class CacheWriter:
    """Writes shards of about `shard_size` bytes into one fingerprint's folder.

    A shard counts once its index is there, and the index is written last. Names carry a random part, so writers that
    know nothing of each other never meet.
    """

    def __init__(self, folder: Path, shard_format: ShardFormat, *, shard_size: int) -> None:
        self._folder, self._format, self._shard_size = folder, shard_format, shard_size
        self._entries: list[Entry] = []
        self._held_bytes = 0
        self.committed_bytes = 0
        self.committed_images = 0

    def add(self, key: str, features: VisionFeatures) -> None:
        """Take one entry, tensors on the CPU; commits a shard when enough is held."""
        self._entries.append((key, features))
        self._held_bytes += features.num_bytes
        if self._held_bytes >= self._shard_size:
            self.commit()

    def commit(self) -> None:
        """Write what is held as one shard. Does nothing when nothing is held.

        Raises:
            ResourceError: the disk is full; what was committed before is intact.
        """
        if not self._entries:
            return
        name = f"shard-{secrets.token_hex(8)}{self._format.suffix}"
        path = self._folder / SHARDS / name
        entries = self._entries
        write_atomically(path, lambda temporary: self._format.write(temporary, entries))
        size = path.stat().st_size
        index = [
            IndexEntry(key=key, image_grid_thw=_grid(features), checksum=checksum(features))
            for key, features in entries
        ]
        save_shard_index(self._folder, ShardIndex(shard=name, num_bytes=size, entries=index))
        self.committed_bytes += size
        self.committed_images += len(entries)
        self._entries, self._held_bytes = [], 0


def _grid(features: VisionFeatures) -> tuple[int, int, int]:
    t, h, w = (int(n) for n in features.image_grid_thw)
    return t, h, w
