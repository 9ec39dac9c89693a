"""Collects features and commits them shard by shard."""

from __future__ import annotations

import secrets
from pathlib import Path
from types import TracebackType

from cache.atomic import write_atomically
from cache.errors import PipelineError, StoppedError
from cache.features import StoredFeatures
from cache.formats import Entry, ShardFormat
from cache.formats.base import checksum, file_checksum
from cache.index import update_index_file
from cache.manifest import SHARDS, IndexEntry, ShardIndex, index_file, save_shard_index


class CacheWriter:
    """Writes shards of about `shard_size` bytes into one fingerprint's folder.

    A shard counts once its index is there, and the index is written last. Names carry a random part, so writers that
    know nothing of each other never meet. Leaving the `with` block commits what is held, whatever ended the block.
    """

    def __init__(self, folder: Path, shard_format: ShardFormat, *, shard_size: int) -> None:
        self._folder, self._format, self._shard_size = folder, shard_format, shard_size
        self._entries: list[Entry] = []
        self._held_bytes = 0
        self.committed_bytes = 0
        self.committed_images = 0

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self.commit()
        except (PipelineError, OSError) as failure:
            # A request to stop promises that everything is kept; any other error is the one to hear about first.
            if error is None or isinstance(error, StoppedError):
                raise
            error.add_note(f"What was held in memory could not be written either: {failure}")
        finally:
            update_index_file(self._folder)

    def add(self, key: str, features: StoredFeatures) -> None:
        """Take one entry, tensors on the CPU; commits a shard when enough is held."""
        self._entries.append((key, features))
        self._held_bytes += features.num_bytes
        if self._held_bytes >= self._shard_size:
            self.commit()

    def commit(self) -> None:
        """Write what is held as one shard. Does nothing when nothing is held.

        Raises:
            ResourceError: the disk is full; what was committed before is intact, what was held is given up.
        """
        if not self._entries:
            return
        # Handed over before the attempt: a shard that could not be written is neither tried again nor held in memory.
        entries, self._entries, self._held_bytes = self._entries, [], 0
        name = f"shard-{secrets.token_hex(8)}{self._format.suffix}"
        path = self._folder / SHARDS / name
        whole = ""

        def write(temporary: Path) -> None:
            nonlocal whole
            self._format.write(temporary, entries)
            whole = file_checksum(temporary)

        write_atomically(path, write)
        size = path.stat().st_size
        index = [
            IndexEntry(key=key, image_grid_thw=_grid(features), checksum=checksum(features))
            for key, features in entries
        ]
        try:
            save_shard_index(self._folder, ShardIndex(shard=name, num_bytes=size, checksum=whole, entries=index))
        except BaseException:
            if not index_file(self._folder, name).exists():
                path.unlink(missing_ok=True)  # it does not count, and would hold its space for ever
            raise
        self.committed_bytes += size
        self.committed_images += len(entries)


def _grid(features: StoredFeatures) -> tuple[int, int, int]:
    t, h, w = (int(n) for n in features.image_grid_thw)
    return t, h, w
