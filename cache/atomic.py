"""Everything written is written to a temporary name beside its target, flushed to the disk, and renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cache.errors import ResourceError

TEMPORARY_MARK = ".tmp-"


def write_atomically(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then make it `target` in one step.

    A reader sees the old file or the new one, never a part. After any failure nothing but the old file remains.

    Raises:
        ResourceError: the disk or the quota is full.
    """
    temporary = temporary_beside(target)
    try:
        with full_disk_named(target):
            write(temporary)
            put_in_place(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Replace `target` by `text` (UTF-8) in one step."""
    write_atomically(target, lambda path: path.write_text(text, encoding="utf-8"))


def temporary_beside(target: Path) -> Path:
    """A name for what is going to be `target`; no other writer takes it."""
    return target.with_name(f"{target.name}{TEMPORARY_MARK}{secrets.token_hex(4)}")


def put_in_place(temporary: Path, target: Path) -> None:
    """Flush a whole file to the disk and give it its name, for good.

    Raises:
        OSError: it cannot be.
    """
    _flush(temporary)
    temporary.replace(target)
    flush_name(target)


@contextmanager
def full_disk_named(target: Path) -> Iterator[None]:
    """A full disk or quota within the block is an error of ours that names `target`.

    Raises:
        ResourceError: see above.
    """
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise disk_full(target) from error
        raise


def disk_full(
    target: Path, what: str = "the disk (or your quota) is full", *, instead: str | None = None
) -> ResourceError:
    """The error for a full disk; what was committed before stays intact.

    Args:
        instead: another way to get space, for the advice.
    """
    ways = "free some space or move the folder" + (f"; {instead};" if instead else ",")
    return ResourceError(what, where=str(target), do=f"{ways} then run the same command again: it goes on where it was")


def flush_folder(folder: Path) -> None:
    """Bring a folder and everything in it to the disk.

    Raises:
        OSError: it cannot be.
    """
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def flush_name(path: Path) -> None:
    """Bring the name of a file or folder, just given to it, to the disk."""
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
