"""What a shard that is being written holds so far: a line an entry, for the run that comes after a killed one.

The journal lies beside the temporary shard as `<its name>.journal` and goes when the shard is committed or given up.
An entry's line is written after its bytes and never changed. Neither is flushed: SIGKILL does not lose what the system
has taken, and after a power failure the entries' checksums decide. docs/cache-format.md has the format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from cache.atomic import TEMPORARY_MARK
from cache.documents import Document
from cache.features import StoredFeatures
from cache.formats.base import bytes_of
from cache.formats.extents import ShardFile
from cache.manifest import SHARDS, IndexEntry

JOURNAL_SUFFIX = ".journal"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
MAX_JOURNAL_BYTES = 1 << 28  # hundreds of times what the largest shard's takes


class JournalEntry(Document):
    """One entry of a shard. Shapes and dtypes are not told: they follow from the manifest and the grid.

    Attributes:
        entry: as the shard's index will list it.
        offsets: of the first byte of each tensor that is in the shard's file.
        late: the bytes of the others, small ones that the format writes when it finishes the shard.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64")

    entry: IndexEntry
    offsets: dict[str, Annotated[int, Field(ge=0, lt=1 << 62)]]
    late: dict[str, bytes]


class Journal:
    """The journal of one shard, from its first entry on.

    Args:
        shard: the temporary file that is being filled.
    """

    def __init__(self, shard: Path) -> None:
        self._path = shard.with_name(shard.name + JOURNAL_SUFFIX)
        self._descriptor = -1

    def add(self, entry: IndexEntry, features: StoredFeatures, offsets: dict[str, int]) -> None:
        """Note an entry whose bytes are in the shard's file.

        Args:
            offsets: what `NewShard.append` has returned for it.

        Raises:
            OSError: it cannot be written; `errno` says why (ENOSPC for a full disk).
        """
        late = {name: bytes(bytes_of(t)) for name, t in features.tensors().items() if name not in offsets}
        line = JournalEntry(entry=entry, offsets=offsets, late=late).model_dump_json() + "\n"
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, _CREATE, 0o666)
        left = memoryview(line.encode())
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def remove(self) -> None:
        """Close and delete it: the shard's entries are committed, or given up. A failure changes neither."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # network file systems tell only now that a line did not fit
                os.close(descriptor)
            with suppress(OSError):  # one that stays is a temporary file, which `pipeline prune` shows
                self._path.unlink()


def find_journals(folder: Path) -> list[Path]:
    """The journals in a fingerprint's folder, of writers that were killed or are at work."""
    return sorted((folder / SHARDS).glob(f"*{TEMPORARY_MARK}*{JOURNAL_SUFFIX}"))


def shards_of(journal: Path) -> tuple[Path, Path]:
    """Where a journal's shard may lie: under its temporary name, or under its own, renamed but not listed yet."""
    temporary = journal.name.removesuffix(JOURNAL_SUFFIX)
    return journal.parent / temporary, journal.parent / temporary.rpartition(TEMPORARY_MARK)[0]


def read_journal(path: Path) -> Iterator[JournalEntry]:
    """The lines that can be used. Damaged ones, such as a last one cut off by the kill, are passed over."""
    try:
        with closing(ShardFile(path)) as file:
            lines = file.bytes_at(0, file.size, "a journal").split(b"\n") if file.size <= MAX_JOURNAL_BYTES else []
    except (OSError, ValueError):  # gone with its shard meanwhile, or no regular file
        return
    for line in lines:
        try:
            yield JournalEntry.model_validate_json(line)
        except ValidationError:
            continue
