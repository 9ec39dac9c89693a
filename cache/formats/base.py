"""What every shard format can do, and the checksum that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar

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
    def write(self, path: Path, entries: Sequence[Entry]) -> None:
        """Write all entries, tensors on the CPU, to a new file at `path`.

        Raises:
            OSError: it cannot be written; `errno` says why (ENOSPC for a full disk).
        """

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

    def close(self) -> None:
        """Release the file. What was read stays."""
        self._file.close()


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that was not there before, open for writing.

    Raises:
        OSError: it cannot be written; names the file, which the system does only where it is opened.
    """
    try:
        with path.open("xb") as file:
            yield file
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def checksum(features: StoredFeatures) -> str:
    """XXH3-128 over the stored bytes of image_embeds, deepstack_features, image_grid_thw and any scales, in hex.

    Source: https://github.com/Cyan4973/xxHash (XXH3); chosen because it runs at memory speed.
    """
    total = xxhash.xxh3_128()
    for tensor in features.tensors().values():
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
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
