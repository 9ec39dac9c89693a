"""Collects features and commits them shard by shard, behind the back of whoever computes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from cache.errors import PipelineError, StoppedError
from cache.features import StoredFeatures
from cache.formats import ShardFormat
from cache.formats.base import checksum
from cache.index import update_index_file
from cache.manifest import ShardIndex
from cache.shard_stream import WAITING_SHARE, ShardStream

# A thread copies some 2 GB a second into a file, less than a fast tower computes, and the kernel lets one at a time
# into a file. Small entries all go the first way, or a small cache would have two shards.
STREAMS, LARGE_ENTRY = 2, 4 << 20
HELD_BACK = STREAMS * WAITING_SHARE  # at most, as a share of a shard's bytes; or an image for each stream


class CacheWriter:
    """Writes shards of about `shard_size` bytes into one fingerprint's folder.

    A shard counts once its index is there, and the index is written last. Names carry a random part, so writers that
    know nothing of each other never meet. Leaving the `with` block commits what was added, whatever ended the block.

    Entries are written and shards committed in threads (cache.shard_stream), large entries into two shards at once.

    Args:
        num_entries: how many will be added at most, where it is known. Then small shards stay small.

    Attributes:
        folder: the fingerprint's.
        committed_bytes, committed_images: so far; final after the block.
    """

    def __init__(
        self, folder: Path, shard_format: ShardFormat, *, shard_size: int, num_entries: int | None = None
    ) -> None:
        self.folder = folder
        self._streams = [
            ShardStream(folder, shard_format, shard_size=shard_size, num_entries=num_entries, committed=self._count)
            for _ in range(STREAMS)
        ]
        self._shard_size = shard_size
        self._unused = dict.fromkeys(self._streams, 0)  # bytes that went another way since, least recently used first
        self._counting = threading.Lock()
        self._closing = 0.0
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
            with ExitStack() as closing:  # each, whatever becomes of the others
                closing.callback(update_index_file, self.folder)
                for stream in self._streams:
                    closing.callback(stream.close)

    def add(self, key: str, features: StoredFeatures) -> None:
        """Take one entry, tensors on the CPU, which must not be changed any more; waits while too many wait.

        Raises:
            ResourceError: the disk is full: an entry that was added before could not be written. What was committed is
                intact, what was not is given up.
        """
        for stream in self._streams:
            stream.check()
        digest = checksum(features)  # in the calling thread: it and the writing threads share the work
        stream = self._streams[0]
        if features.num_bytes >= LARGE_ENTRY:
            stream = min(self._unused, key=lambda one: one.waiting)  # of several, the one that was used least recently
        stream.add(key, features, digest)
        self._let_go_of_what_is_unused(stream, features.num_bytes)

    def _let_go_of_what_is_unused(self, used: ShardStream, num_bytes: int) -> None:
        """No shard stays open for longer than another one takes to fill: what is in it would count hours later."""
        del self._unused[used]
        self._unused[used] = -num_bytes
        for stream in self._unused:
            self._unused[stream] += num_bytes
            if self._unused[stream] >= self._shard_size:
                self._unused[stream] = 0
                stream.let_go()

    @property
    def waited(self) -> float:
        """Seconds that `add` and `commit` waited for the disk."""
        return self._closing + sum(stream.waited for stream in self._streams)

    def commit(self) -> None:
        """Commit everything that was added, as one more shard where need be.

        Raises:
            ResourceError: see `add`.
        """
        started = time.perf_counter()
        try:
            _all([stream.finish_shard for stream in self._streams] + [stream.drain for stream in self._streams])
        finally:
            self._closing += time.perf_counter() - started

    def _count(self, shard: ShardIndex) -> None:
        with self._counting:
            self.committed_bytes += shard.num_bytes
            self.committed_images += len(shard.entries)


def _all(calls: list[Callable[[], None]]) -> None:
    """Make all calls, whatever comes of them; raises the first error, with what the others said."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:  # an interrupt ends it at once
            errors.append(error)
    if errors:
        for other in errors[1:]:
            errors[0].add_note(f"And: {other}")
        raise errors[0]
