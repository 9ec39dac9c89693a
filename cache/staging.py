"""Copies the shards that a run needs to a disk of the node, so that training reads them at that disk's speed.

What is in the target folder is a cache like any other, only with fewer shards. Safe without locks: every file is
written under a name of its own and renamed, a shard before its index, so processes and jobs that copy the same shard at
the same time do work twice and never harm.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from cache.atomic import TEMPORARY_MARK, disk_full, write_atomically
from cache.errors import CacheError, ResourceError
from cache.files import CacheFiles
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS, ShardFormat
from cache.formats.base import file_checksum
from cache.index import update_index_file
from cache.index_table import ShardStamp
from cache.manifest import MANIFEST_FILE, SHARDS, SPLITS, ShardIndex, index_file, load_shard_index
from cache.node_folder import node_folder
from cache.progress import Progress
from cache.reader import FeatureCache
from cache.verify import check_entries

PIECE_BYTES = 16 << 20
SPARE_BYTES = 64 << 20  # indexes, lists, and what a file system itself takes
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 1800.0  # without any change in the folder, after which nobody seems to be copying


def stage(
    cache: FeatureCache,
    target: Path,
    splits: Sequence[str],
    progress: Progress,
    *,
    copies: bool = True,
    verify_checksums: bool = True,
    patience: float = PATIENCE_SECONDS,
) -> FeatureCache:
    """The cache with the splits' shards in a folder below `target`, copied there unless they are there already.

    Args:
        cache: in a folder or at an address.
        target: cache.stage_to; its variables are those of this process (cache.node_folder).
        splits: whose images are needed.
        copies: whether this process copies; on each node one should. The others wait until everything is there. They
            trust a shard whose index is there: should it be a damaged copy of an earlier run, reading it is an error,
            and starting again, after the copying process has replaced it, is not.
        patience: seconds that a waiting process waits for a change in the folder.

    Raises:
        ConfigError: a variable of `target` is not set.
        CacheError: a split is not complete, a shard is damaged at its source, or nobody copies.
        ResourceError: the space does not suffice.
    """
    target = node_folder(target, "cache.stage_to")
    documents = {place: _document(cache.files, place) for place in [MANIFEST_FILE, *map(_list_of, splits)]}
    # Caches of one fingerprint may differ in format: each manifest has a folder of its own.
    which = f"{Fingerprint(cache.manifest.fingerprint).name}-{xxhash.xxh3_64_hexdigest(documents[MANIFEST_FILE])}"
    staging = _Staging(cache.files, target / which, documents, _needed(cache, splits), FORMATS[cache.manifest.format])
    if copies:
        staging.copy(progress)
    else:
        _wait_for(staging.is_complete, staging.folder, patience, progress)
    return FeatureCache(staging.folder, verify_checksums=verify_checksums)


def _list_of(split: str) -> str:
    return f"{SPLITS}/{split}.json"


def _document(files: CacheFiles, place: str) -> bytes:
    content = files.document(place)
    if content is None:
        raise CacheError(
            f"{place} is missing", where=files.where, do=files.advice("`pipeline cache --split NAME` for this split")
        )
    return content


def _needed(cache: FeatureCache, splits: Sequence[str]) -> list[ShardStamp]:
    stamps = [stamp for split in splits for stamp in cache.shards_of([i.key for i in cache.split(split).images])]
    return list({stamp.shard: stamp for stamp in stamps}.values())


@dataclass(frozen=True, slots=True)
class _Staging:
    """Some shards of a cache, and the folder that they are to lie in."""

    files: CacheFiles
    folder: Path
    documents: dict[str, bytes]
    stamps: list[ShardStamp]
    shard_format: ShardFormat

    def is_complete(self) -> bool:
        """Whether everything has been copied, as far as the shards' names and sizes tell."""
        return all(self._has(place) for place in self.documents) and all(
            index_file(self.folder, stamp.shard).is_file() and _size(self._shard(stamp)) == stamp.num_bytes
            for stamp in self.stamps
        )

    def copy(self, progress: Progress) -> None:
        """Copy what is not there."""
        for part in (SHARDS, SPLITS):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._require_space(_remove_remains(self.folder))
        for place, content in self.documents.items():
            if not self._has(place):
                write_atomically(self.folder / place, lambda temporary, c=content: temporary.write_bytes(c))  # type: ignore[misc]
        # Jobs that start at the same time begin at different ends, and find done what another one has done.
        order = secrets.SystemRandom().sample(self.stamps, len(self.stamps))
        progress.start(f"copying shards to {self.folder}", _megabytes(sum(s.num_bytes for s in order)), "MB")
        for stamp in order:
            if not self._is_there(stamp):
                self._copy_shard(stamp)
            progress.advance(_megabytes(stamp.num_bytes))
        progress.finish()
        update_index_file(self.folder)

    def _require_space(self, held: int) -> None:
        missing = sum(s.num_bytes for s in self.stamps if _size(self._shard(s)) != s.num_bytes)
        free = shutil.disk_usage(self.folder).free
        remains = f"; {_megabytes(held)} MB are held by copies that are under way or were killed" if held else ""
        later = f"; what a killed copy has left is removed {PATIENCE_SECONDS / 60:.0f} minutes later" if held else ""
        if missing and missing + SPARE_BYTES > free:
            raise ResourceError(
                f"the run's shards take {_megabytes(missing)} MB more, and {_megabytes(free)} MB are free{remains}",
                where=str(self.folder),
                do="free some space there, or set cache.stage_to to another folder, or to null to read the cache where "
                f"it lies{later}",
            )

    def _is_there(self, stamp: ShardStamp) -> bool:
        """Whether an intact copy of this very shard is there."""
        shard, index = self._shard(stamp), index_file(self.folder, stamp.shard)
        if not index.is_file() or _size(shard) != stamp.num_bytes:
            return False
        try:
            return self._is_intact(shard, load_shard_index(index))
        except (CacheError, OSError):
            return False

    def _copy_shard(self, stamp: ShardStamp) -> None:
        place = index_file(Path(SHARDS).parent, stamp.shard).as_posix()
        index, content = self._read_index(stamp, place)
        shard = self._shard(stamp)

        def write(temporary: Path) -> None:
            whole = self._copy_bytes(stamp, temporary)
            if not (whole == index.checksum if index.checksum else self._is_intact(temporary, index)):
                raise self.files.damaged(stamp.shard, "the shard does not match its checksum")

        write_atomically(shard, write)
        write_atomically(self.folder / place, lambda temporary: temporary.write_bytes(content))

    def _copy_bytes(self, stamp: ShardStamp, target: Path) -> str:
        """Copy a shard; returns the checksum of what was read."""
        total = xxhash.xxh3_128()
        piece = memoryview(bytearray(min(PIECE_BYTES, stamp.num_bytes)))
        try:
            source = self.files.shard(stamp)
        except (ValueError, OSError) as error:
            raise self.files.damaged(stamp.shard, f"the shard cannot be opened: {error}") from error
        try:
            with target.open("xb", buffering=0) as file:
                for offset in range(0, stamp.num_bytes, PIECE_BYTES):
                    part = piece[: min(PIECE_BYTES, stamp.num_bytes - offset)]
                    try:
                        source.fill(part, offset)
                    except (ValueError, OSError) as error:
                        raise self.files.damaged(stamp.shard, f"the shard cannot be read: {error}") from error
                    total.update(part)
                    while part:
                        part = part[file.write(part) :]
        finally:
            source.close()
        return total.hexdigest()

    def _read_index(self, stamp: ShardStamp, place: str) -> tuple[ShardIndex, bytes]:
        """The JSON index of a shard, checked, and its bytes."""
        content = _document(self.files, place)
        # Checked by the reader of local files, under a name that does not count as a shard's index.
        scratch = self.folder / f"{stamp.shard}{TEMPORARY_MARK}{secrets.token_hex(4)}"
        try:
            scratch.write_bytes(content)
            index = load_shard_index(scratch)
        except CacheError as error:
            raise self.files.damaged(stamp.shard, f"its index {error.what}") from error
        except OSError as error:
            raise disk_full(scratch, f"cannot be written: {error.strerror}") from error
        finally:
            scratch.unlink(missing_ok=True)
        if (index.shard, index.num_bytes) != (stamp.shard, stamp.num_bytes):
            raise self.files.damaged(stamp.shard, "its index belongs to another shard")
        return index, content

    def _has(self, place: str) -> bool:
        file = self.folder / place
        return file.is_file() and file.read_bytes() == self.documents[place]

    def _shard(self, stamp: ShardStamp) -> Path:
        return self.folder / SHARDS / stamp.shard

    def _is_intact(self, shard: Path, index: ShardIndex) -> bool:
        if index.checksum:
            return file_checksum(shard) == index.checksum
        return not check_entries(shard, self.shard_format, index.entries)[1]


def _remove_remains(folder: Path) -> int:
    """Delete what killed copies have left; returns the bytes of what may be such but is too young to tell.

    Who copies writes all the time; one that was kept from it for so long meets a missing file, and is started again.
    """
    young, before = 0, time.time() - PATIENCE_SECONDS
    for part in (folder, folder / SHARDS, folder / SPLITS):
        for file in part.glob(f"*{TEMPORARY_MARK}*"):
            with suppress(FileNotFoundError):  # it is no temporary file any more
                status = file.stat()
                if status.st_mtime < before:
                    file.unlink()
                else:
                    young += status.st_size
    return young


def _wait_for(done: Callable[[], bool], folder: Path, patience: float, progress: Progress) -> None:
    """Wait for the process that copies.

    Raises:
        CacheError: nothing has changed for `patience` seconds.
    """
    seen, since = _state(folder), time.monotonic()
    while not done():
        now = _state(folder)
        if now != seen:
            seen, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            raise CacheError(
                f"nothing has been copied here for {patience:.0f} s, and shards are missing",
                where=str(folder),
                do="look at the log of the node's process 0, which copies; then start again: it goes on where it was",
            )
        progress.advance(0)  # one that can end the work does so here
        time.sleep(POLL_SECONDS)


def _state(folder: Path) -> dict[str, int]:
    """Sizes of all files, to see whether somebody is at work."""
    sizes = {str(file): _size(file) for part in (folder, folder / SHARDS, folder / SPLITS) for file in part.glob("*")}
    return {name: size for name, size in sizes.items() if size is not None}


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None


def _megabytes(size: int) -> int:
    return -(-size // 1_000_000)
