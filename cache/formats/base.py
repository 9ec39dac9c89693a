"""What every shard format can do, and the checksum that all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from cache.features import VisionFeatures

Entry = tuple[str, VisionFeatures]


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

    @abstractmethod
    def open(self, path: Path) -> ShardReader:
        """Open a shard for random access.

        Raises:
            ValueError, OSError: the file is not a shard of this format.
        """


class ShardReader(ABC):
    """An open shard."""

    @abstractmethod
    def keys(self) -> list[str]:
        """The keys of all entries."""

    @abstractmethod
    def read(self, key: str) -> VisionFeatures:
        """One entry.

        Raises:
            KeyError: no such entry.
            ValueError, OSError: it cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file."""


def checksum(features: VisionFeatures) -> str:
    """XXH3-128 over the bytes of image_embeds, deepstack_features and image_grid_thw, in hex.

    Source: https://github.com/Cyan4973/xxHash (XXH3); chosen because it runs at memory speed.
    """
    total = xxhash.xxh3_128()
    for tensor in (features.image_embeds, features.deepstack_features, features.image_grid_thw):
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
