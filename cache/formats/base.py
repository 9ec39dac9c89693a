"""What every shard format can do, and the checksum that all of them share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from cache.features import StoredFeatures
from cache.formats.extents import EntryExtents, ShardFile

Entry = tuple[str, StoredFeatures]


class ShardFormat(ABC):
    """Writes and opens shards of one format. The cache owns names, commits and the index; the format owns bytes."""

    name: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def create(self, path: Path, num_entries: int) -> NewShard:
        """Begin a shard in a new file at `path`.

        Args:
            num_entries: how many it may hold at most; space may be set aside for so many.

        Raises:
            OSError: it cannot be written; `errno` says why (ENOSPC for a full disk).
        """

    def write(self, path: Path, entries: Sequence[Entry]) -> None:
        """Write all entries, tensors on the CPU, to a new file at `path`.

        Raises:
            OSError: see `create`.
        """
        shard = self.create(path, len(entries))
        try:
            for key, features in entries:
                shard.append(key, features)
            shard.finish()
        except BaseException:
            shard.abandon()
            raise

    def open(self, path: Path) -> ShardReader:
        """Open a shard for random access.

        Raises:
            ValueError, OSError: the file is not a shard of this format.
        """
        return self.open_file(ShardFile(path))

    @abstractmethod
    def open_file(self, file: ShardFile) -> ShardReader:
        """As `open`, for a file that is open already, perhaps one that lies elsewhere; the reader closes it."""


class ShardReader(ABC):
    """An open shard. Reads are positional, so threads and forked processes may share it."""

    def __init__(self, file: ShardFile) -> None:
        self._file = file

    @abstractmethod
    def keys(self) -> list[str]:
        """The keys of all entries, sorted."""

    @abstractmethod
    def extents(self, key: str) -> EntryExtents:
        """Where the tensors of an entry lie.

        Raises:
            KeyError: no such entry.
            ValueError, OSError: the file is not what it should be.
        """

    def read(self, key: str, out: torch.Tensor | None = None) -> StoredFeatures:
        """One entry as it is stored, on the CPU.

        Args:
            out: contiguous uint8 memory, at least `extents(key).out_bytes`, that the features are read into and that
                they share from then on; it may be pinned or shared. Without it they have memory of their own, whose
                first touch costs as much again as reading.

        Raises:
            KeyError: no such entry.
            ValueError, OSError: it cannot be read.
            TypeError: `out` is not such memory.
        """
        return self._file.read_entry(self.extents(key), out)

    def read_checked(self, key: str, out: torch.Tensor | None = None) -> tuple[StoredFeatures, str]:
        """One entry, and the checksum of what was read: in less time than `read` and `checksum` one after the other.

        Args and errors: see `read`.
        """
        total = xxhash.xxh3_128()
        return self._file.read_entry(self.extents(key), out, total.update), total.hexdigest()

    def close(self) -> None:
        """Release the file. What was read stays."""
        self._file.close()


class NewShard(ABC):
    """A shard on its way to the disk: an entry's bytes are in the file as soon as it is appended, and not kept."""

    def has_room(self, _features: StoredFeatures) -> bool:
        """Whether such an entry may still be appended."""
        return True

    @abstractmethod
    def append(self, key: str, features: StoredFeatures) -> dict[str, int]:
        """Write one entry, tensors on the CPU.

        Returns:
            Offset in the file of each tensor whose bytes are there now, for good; `finish` writes the others.

        Raises:
            OSError: it cannot be written; `errno` says why (ENOSPC for a full disk).
        """

    @abstractmethod
    def finish(self) -> None:
        """Write what a reader needs beside the entries, and close the file. May run in another thread than `append`.

        Raises:
            OSError: it cannot be written.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Close the file, whatever it holds; the caller removes it."""


class OutputFile:
    """A new file that is written in order, and at the start once more.

    Attributes:
        place: the next byte to write.
    """

    def __init__(self, path: Path) -> None:
        """Create it.

        Raises:
            OSError: it cannot be created, or is there already.
        """
        self._path = path
        self._file = path.open("xb", buffering=0)
        self.place = 0

    def append(self, content: bytes | memoryview) -> None:
        """Write behind what is there.

        Raises:
            OSError: it cannot be written; names the file, which the system does only where it is opened.
        """
        self.write_at(self.place, content)
        self.place += memoryview(content).nbytes

    def append_tensor(self, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes behind what is there; raises as `append` does."""
        if tensor.numel():
            self.append(bytes_of(tensor))

    def write_at(self, place: int, content: bytes | memoryview) -> None:
        """Write at a place; raises as `append` does."""
        try:
            write_at(self._file.fileno(), place, content)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def leave_room(self, count: int) -> None:
        """The next byte to write comes `count` bytes later."""
        self.place += count

    def close(self) -> None:
        """Close it."""
        self._file.close()


def write_at(descriptor: int, place: int, content: bytes | memoryview) -> None:
    """Write all bytes, and let the disk begin with them.

    Raises:
        OSError: they cannot be written.
    """
    left, at = memoryview(content), place
    while left.nbytes:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
    # Linux starts to write what it is told is not needed soon, and waits for nothing: else a disk would idle until a
    # whole shard is flushed at once.
    os.posix_fadvise(descriptor, place, at - place, os.POSIX_FADV_DONTNEED)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, without a copy where it is contiguous."""
    view: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return view


def checksum(features: StoredFeatures) -> str:
    """XXH3-128 over the stored bytes of image_embeds, deepstack_features, image_grid_thw and any scales, in hex.

    Source: https://github.com/Cyan4973/xxHash (XXH3); chosen because it runs at memory speed.
    """
    total = xxhash.xxh3_128()
    for tensor in features.tensors().values():
        total.update(bytes_of(tensor))
    return total.hexdigest()


def file_checksum(path: Path) -> str:
    """XXH3-128 over a whole file, in hex: finds what no entry's checksum covers, such as padding.

    Raises:
        OSError: it cannot be read.
    """
    total = xxhash.xxh3_128()
    buffer = memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total.update(buffer[:count])
    return total.hexdigest()
