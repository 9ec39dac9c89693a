"""Fills one shard after another and commits them, in threads of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cache.atomic import full_disk_named, put_in_place, temporary_beside
from cache.background import Stage
from cache.features import StoredFeatures
from cache.formats import ShardFormat
from cache.formats.base import NewShard, file_checksum
from cache.journal import Journal
from cache.manifest import SHARDS, IndexEntry, ShardIndex, index_file, save_shard_index

# Features that wait to be written, in bytes, and as a share of a shard's; or one image. What holds more back while the
# disk pauses is cache.copy_back.
WAITING_BYTES, WAITING_SHARE = 64 << 20, 1 / 64
_ROOM_SHARE = 1.25  # images differ in size: room for somewhat more entries than there are of the first one's size
_SMALL_ENTRY = 1 << 20
_MAX_ENTRIES = 8192  # a header with room for more would be megabytes at every opening


@dataclass(slots=True)
class _OpenShard:
    """A shard that is being filled."""

    path: Path
    temporary: Path
    file: NewShard
    journal: Journal
    num_bytes: int = 0
    entries: list[IndexEntry] = field(default_factory=list)


class ShardStream:
    """One thread writes entries into the shard in hand, another one hashes, flushes and commits the shard before it.

    An entry is held in memory until it is in the shard's file, and no longer. From then on it outlives a SIGKILL: a
    journal beside the file tells where it lies (cache.salvage).

    Args:
        folder: the fingerprint's.
        num_entries: how many will be added at most, where it is known. Then small shards stay small.
        committed: called for each shard that counts from now on, in the committing thread.
    """

    def __init__(
        self,
        folder: Path,
        shard_format: ShardFormat,
        *,
        shard_size: int,
        num_entries: int | None,
        committed: Callable[[ShardIndex], None],
    ) -> None:
        self._folder, self._format, self._shard_size = folder, shard_format, shard_size
        self._expected, self._committed = num_entries, committed
        self._open: _OpenShard | None = None
        self._writing = Stage[tuple[str, StoredFeatures, str] | None](
            "write features", self._write, limit=min(WAITING_BYTES, int(WAITING_SHARE * shard_size))
        )
        self._committing = Stage[_OpenShard]("commit shards", self._commit, limit=1)

    @property
    def waited(self) -> float:
        """Seconds that `add` waited for the disk."""
        return self._writing.waited

    @property
    def waiting(self) -> int:
        """Bytes that are not in a file yet."""
        return self._writing.unfinished

    def check(self) -> None:
        """Raise what went wrong in writing and was not raised yet; of a commit, the next one or `drain` tells."""
        self._writing.check()

    def add(self, key: str, features: StoredFeatures, digest: str) -> None:
        """Take one entry; waits while too much waits. Raises as `CacheWriter.add` does."""
        self._writing.put((key, features, digest), features.num_bytes)

    def let_go(self) -> None:
        """Let the shard in hand be committed when what was added is in it, however little; waits as `add` does."""
        self._writing.put(None, 1)  # counts, so that draining waits for it

    def finish_shard(self) -> None:
        """Wait until all entries are written, and let the shard in hand be committed."""
        self._writing.drain()
        self._hand_over()

    def drain(self) -> None:
        """Wait until what was handed over is committed."""
        self._committing.drain()

    def close(self) -> None:
        """End the threads. Nothing is left of a shard that was not committed."""
        self._writing.close()
        self._committing.close()
        self._give_up()

    def _write(self, item: tuple[str, StoredFeatures, str] | None) -> None:
        if item is None:
            self._hand_over()
            return
        key, features, digest = item
        if self._open is not None and not self._open.file.has_room(features):
            self._hand_over()
        shard = self._open or self._begin(features)
        try:
            with full_disk_named(shard.path):
                offsets = shard.file.append(key, features)
                entry = IndexEntry(key=key, image_grid_thw=_grid(features), checksum=digest)
                shard.journal.add(entry, features, offsets)
        except BaseException:
            self._give_up()
            raise
        shard.entries.append(entry)
        shard.num_bytes += features.num_bytes
        if shard.num_bytes >= self._shard_size:
            self._hand_over()

    def _begin(self, first: StoredFeatures) -> _OpenShard:
        """A new shard, with room for about as many entries like the first one as fill it, or as small ones."""
        like_first = int(_ROOM_SHARE * self._shard_size / max(first.num_bytes, 1)) + 1
        room = min(max(like_first, self._shard_size // _SMALL_ENTRY), _MAX_ENTRIES)
        if self._expected is not None:
            room = max(1, min(room, self._expected))
        path = self._folder / SHARDS / f"shard-{secrets.token_hex(8)}{self._format.suffix}"
        temporary = temporary_beside(path)
        try:
            with full_disk_named(path):
                file = self._format.create(temporary, room)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._open = _OpenShard(path, temporary, file, Journal(temporary))
        return self._open

    def _hand_over(self) -> None:
        """Let the shard in hand be committed; waits until the one before it is."""
        if self._open is None:
            return
        if self._expected is not None:
            self._expected -= len(self._open.entries)
        try:
            self._committing.put(self._open)
        except BaseException:
            self._give_up()
            raise
        self._open = None

    def _give_up(self) -> None:
        """Leave nothing of the shard in hand: it is neither tried again nor does it hold space."""
        shard, self._open = self._open, None
        if shard is not None:
            with suppress(OSError):  # a full disk is told at the close once more
                shard.file.abandon()
            with suppress(OSError):  # `pipeline prune` finds it
                shard.temporary.unlink(missing_ok=True)
            shard.journal.remove()

    def _commit(self, shard: _OpenShard) -> None:
        try:
            whole = self._put_in_place(shard)
            self._list(shard, whole)
        except BaseException:
            if not index_file(self._folder, shard.path.name).exists():
                shard.path.unlink(missing_ok=True)  # it does not count, and would hold its space for ever
            raise
        finally:
            shard.journal.remove()  # until the index is there, only the journal says what is in the shard

    def _put_in_place(self, shard: _OpenShard) -> str:
        """Finish the shard and give it its name; returns its checksum."""
        try:
            with full_disk_named(shard.path):
                try:
                    shard.file.finish()
                except BaseException:
                    shard.file.abandon()
                    raise
                whole = file_checksum(shard.temporary)
                put_in_place(shard.temporary, shard.path)
        finally:
            shard.temporary.unlink(missing_ok=True)
        return whole

    def _list(self, shard: _OpenShard, whole: str) -> None:
        """Write the index: from now on the shard's entries count."""
        size = shard.path.stat().st_size
        index = ShardIndex(shard=shard.path.name, num_bytes=size, checksum=whole, entries=shard.entries)
        save_shard_index(self._folder, index)
        self._committed(index)


def _grid(features: StoredFeatures) -> tuple[int, int, int]:
    t, h, w = (int(n) for n in features.image_grid_thw)
    return t, h, w
