"""Size and content of many images from their leading bytes alone, for a plan. Decodes nothing."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cache.errors import DataError
from cache.image_formats import require_format
from cache.keys import image_key
from cache.preprocess import header_size
from cache.progress import Progress
from cache.records import ImageRef, require_size, unreadable

HEAD_BYTES = 1 << 14  # most images tell their size before this, and two different photographs differ before it
LONG_HEAD_BYTES = 1 << 16  # nearly every JPEG's metadata ends before this, a camera's with its thumbnail too
THREADS = 4  # hide the latency of a network file system; identifying an image holds the GIL
CHUNK = 64  # images a task: a task an image would cost as much as the image
_WHOLE_FILE_NEEDED = (b"RIFF", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # WebP and TIFF, as header_size says


@dataclass(frozen=True, slots=True)
class Header:
    """What the leading bytes tell of an image.

    Attributes:
        height, width: upright, in pixels.
        num_bytes: of the encoded file.
        head: XXH3-128 of the first HEAD_BYTES.
    """

    height: int
    width: int
    num_bytes: int
    head: bytes

    @property
    def is_whole(self) -> bool:
        """Whether `head` covers the whole file."""
        return self.num_bytes <= HEAD_BYTES


def read_headers(refs: Sequence[ImageRef], progress: Progress) -> list[Header | DataError]:
    """The header of every image, in order, or why it cannot be used."""
    progress.start("reading image headers", len(refs), "image")
    found: list[Header | DataError] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for part in pool.map(_read_chunk, [refs[at : at + CHUNK] for at in range(0, len(refs), CHUNK)]):
            found.extend(part)
            progress.advance(len(part))
    progress.finish()
    return found


def content_ids(images: Sequence[tuple[ImageRef, Header]]) -> Iterator[Hashable]:
    """For each image something that is equal for equal bytes only.

    A file is read whole only if another one has the same size and the same leading bytes.

    Raises:
        DataError: such a file cannot be read (any more).
    """
    shared = Counter((header.num_bytes, header.head) for _, header in images)
    whole: dict[object, str] = {}  # one file may stand under several splits
    for ref, header in images:
        content = (header.num_bytes, header.head)
        if header.is_whole or shared[content] == 1:
            yield content
            continue
        name = ref.file or (content, ref.path)
        if name not in whole:
            whole[name] = image_key(ref.read())
        yield (*content, whole[name])


def _read_chunk(refs: Sequence[ImageRef]) -> list[Header | DataError]:
    return [_read_header(ref) for ref in refs]


def _read_header(ref: ImageRef) -> Header | DataError:
    try:
        head, num_bytes = _leading_bytes(ref)
        height, width = _size(ref, head, num_bytes)
    except DataError as error:
        return DataError(error.what, where=ref.path, do=error.do)
    return Header(height, width, num_bytes, xxhash.xxh3_128_digest(head[:HEAD_BYTES]))


def read_head(file: Path) -> bytes:
    """The first HEAD_BYTES of a regular file, or fewer.

    Raises:
        ReadError: it cannot be read.
    """
    try:
        with file.open("rb", buffering=0) as opened:
            return opened.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(str(file), error) from error


def _leading_bytes(ref: ImageRef) -> tuple[bytes, int]:
    """At least the first HEAD_BYTES and the file's size. What is amiss with the file is said by `ref.read`."""
    if ref.file is not None and (found := _start_of(ref.file, HEAD_BYTES)) is not None:
        return found
    data = ref.read()
    return data, len(data)


def _start_of(file: Path, count: int) -> tuple[bytes, int] | None:
    """The first bytes of a regular file that is not empty, and its size; None for anything else."""
    descriptor = -1
    try:
        # A named pipe would block for ever.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size:
            return os.read(descriptor, count), status.st_size
    except OSError:
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return None


def _size(ref: ImageRef, head: bytes, num_bytes: int) -> tuple[int, int]:
    """(height, width). A PNG's orientation behind its pixels is not seen: it exchanges the two and changes no count."""
    if num_bytes == len(head):
        return header_size(head, where=ref.path)
    require_size(num_bytes, ref.path)
    require_format(head, num_bytes, where=ref.path)  # before the whole of a file that is no image is read
    if not head.startswith(_WHOLE_FILE_NEEDED) and head[4:8] != b"ftyp":
        for longer in (False, True):
            with suppress(DataError):  # metadata longer than the leading bytes
                return header_size(_long_head(ref, head) if longer else head, where=ref.path)
    return header_size(ref.read(), where=ref.path)


def _long_head(ref: ImageRef, head: bytes) -> bytes:
    found = None if ref.file is None else _start_of(ref.file, LONG_HEAD_BYTES)
    return head if found is None else found[0]
