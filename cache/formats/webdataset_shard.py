"""WebDataset shards: a tar file with one member an entry, `<key>.safetensors`, itself a whole safetensors file.

Formats: https://github.com/webdataset/webdataset#the-webdataset-format, https://github.com/huggingface/safetensors,
POSIX ustar (https://pubs.opengroup.org/onlinepubs/9799919799/utilities/pax.html). See docs/cache-format.md.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from cache.features import SCALES, StoredFeatures
from cache.formats.base import NewShard, OutputFile, ShardFormat, ShardReader
from cache.formats.extents import FIELDS, EntryExtents, ShardFile
from cache.formats.safetensors_header import read_header
from cache.formats.safetensors_layout import SafetensorsLayout

BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
MEMBER = re.compile(rb"([0-9a-f]{64})\.safetensors\0")
SIZE = re.compile(rb"[0-7]{11}\0")


class WebDatasetFormat(ShardFormat):
    """See the module's docstring."""

    name = "webdataset"
    suffix = ".tar"

    def create(self, path: Path, num_entries: int) -> NewShard:  # noqa: ARG002  (no room is set aside)
        return _NewShard(path)

    def open_file(self, file: ShardFile) -> ShardReader:
        return _Reader(file)


class _NewShard(NewShard):
    def __init__(self, path: Path) -> None:
        self._file = OutputFile(path)

    def append(self, key: str, features: StoredFeatures) -> dict[str, int]:
        layout = SafetensorsLayout(features.tensors(), self._file.place + BLOCK)
        self._file.append(_member(key, layout.num_bytes).tobuf(tarfile.USTAR_FORMAT))
        layout.write(self._file)
        self._file.append(bytes(-layout.num_bytes % BLOCK))
        return layout.offsets

    def finish(self) -> None:
        self._file.append(bytes(2 * BLOCK))
        self._file.append(bytes(-self._file.place % RECORD))
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


class _Reader(ShardReader):
    """Knows where every member lies; a member's own header is read with its entry."""

    def __init__(self, file: ShardFile) -> None:
        super().__init__(file)
        self._members = _scan(file)
        self._known: dict[str, EntryExtents] = {}

    def keys(self) -> list[str]:
        return sorted(self._members)

    def extents(self, key: str) -> EntryExtents:
        known = self._known.get(key)
        if known is None:
            offset, size = self._members[key]
            tensors = read_header(self._file, offset, size, {})
            if tensors.keys() - {SCALES} != set(FIELDS):
                raise ValueError(f"member {key[:12]}... holds other tensors than {', '.join(FIELDS)}")
            known = self._known[key] = EntryExtents(**tensors)
        return known


def _scan(file: ShardFile) -> dict[str, tuple[int, int]]:
    """Key -> offset and size of its member.

    Raises:
        ValueError: anything is not exactly as `write` makes it: names that could lead elsewhere, links, folders,
            other owners or times, sizes beyond the file, padding that is not empty.
    """
    if file.size % RECORD or not file.size:
        raise ValueError(f"is not a tar shard: {file.size} bytes are no whole number of records")
    members: dict[str, tuple[int, int]] = {}
    place = 0
    while any(block := file.bytes_at(place, BLOCK, "a member's header")):
        name, octal = MEMBER.match(block), SIZE.fullmatch(block[124:136])
        if name is None or octal is None:
            raise ValueError(f"the tar header at byte {place} is not one of a shard")
        key, size = name[1].decode(), int(octal[0][:11], 8)
        if block != _member(key, size).tobuf(tarfile.USTAR_FORMAT) or key in members:
            raise ValueError(f"the tar header at byte {place} is not one of a shard, or its key stands twice")
        offset = place + BLOCK
        members[key] = offset, size
        place = offset + -(-size // BLOCK) * BLOCK
        if any(file.bytes_at(offset + size, place - offset - size, "a member's padding")):
            raise ValueError(f"the padding before byte {place} is not empty")
    end = -(-(place + 2 * BLOCK) // RECORD) * RECORD
    if file.size != end or any(file.bytes_at(place, end - place, "the end of the archive")):
        raise ValueError(f"the archive does not end at byte {place}, where its members do")
    return members


def _member(key: str, size: int) -> tarfile.TarInfo:
    """Mode 0644; times, owners and groups are 0 and unnamed, so that equal entries give equal files."""
    member = tarfile.TarInfo(f"{key}.safetensors")
    member.size = size
    return member
