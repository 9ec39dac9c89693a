"""Makes a damaged cache usable again: what is damaged is moved aside, what is intact is kept, the rest is made anew."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from cache.errors import CacheError
from cache.formats import FORMATS, ShardFormat
from cache.journal import find_journals, shards_of
from cache.manifest import SHARDS, IndexEntry, load_manifest
from cache.progress import Progress
from cache.verify import ShardState, check_entries, verify_cache
from cache.writer import CacheWriter

DAMAGED = "damaged"  # folder within the fingerprint's
STALE_SECONDS = 3600.0  # no writer takes longer between a shard and its index


@dataclass(frozen=True, slots=True)
class Repair:
    """What was done.

    Attributes:
        moved: files moved to `damaged/`, by their new places.
        kept_images: entries of damaged shards that were intact and stand in a new shard now.
        lost_images: entries that have to be encoded anew, as far as the indexes tell.
    """

    moved: list[Path]
    kept_images: int
    lost_images: int


def set_damaged_aside(folder: Path, shard_format: ShardFormat, shard_size: int, progress: Progress) -> Repair:
    """Move every damaged file to `<folder>/damaged/` after rewriting what is intact in it. Deletes nothing.

    May be killed at any moment and run again. What it leaves is a cache without damage that may lack entries:
    `pipeline cache` makes those.

    Args:
        folder: of the fingerprint.
        shard_format, shard_size: of the shards to write; an intact manifest's format goes before the one given.

    Raises:
        CacheError: there is no cache in `folder`.
        ResourceError: the disk is full.
    """
    found = verify_cache(folder, progress)
    shard_format = _format_in_use(folder, shard_format)
    damaged = [(state.index_file, *_salvage(state)) for state in found.shards if state.damages]
    safe = {key for state in found.shards if not state.damages for key in state.intact}
    lost, moved = {entry.key for _, _, entries in damaged for entry in entries}, []
    with CacheWriter(folder, shard_format, shard_size=shard_size, num_entries=len(lost)) as writer:
        for index, shard, entries in damaged:
            if shard is not None and shard.is_file():
                safe |= _rewrite(shard, entries, safe, writer)
                writer.commit()
            # The index first: from then on the shard does not count, and its intact entries stand in the new one.
            moved += _move_aside(folder, index)
            moved += _move_aside(folder, shard) if shard is not None else []
        for damage in found.damages:
            moved += _move_aside(folder, damage.file)
        for orphan in shards_without_index(folder):
            moved += _move_aside(folder, orphan)
    return Repair(moved, writer.committed_images, len(lost - safe))


def shards_without_index(folder: Path, *, older_than: float = STALE_SECONDS) -> list[Path]:
    """Shards that do not count: their writer was killed before the index, or the index was lost.

    Not those that have a journal: the next `pipeline cache` takes up what they hold (cache.salvage).

    Args:
        older_than: seconds; a younger one may be about to get its index.
    """
    before = time.time() - older_than
    noted = {shard for journal in find_journals(folder) for shard in shards_of(journal)}
    shards = {file for form in FORMATS.values() for file in (folder / SHARDS).glob(f"*{form.suffix}")}
    return sorted(file for file in shards - noted if not _index_of(file).exists() and _is_older(file, before))


def _is_older(file: Path, moment: float) -> bool:
    try:
        return file.stat().st_mtime < moment
    except FileNotFoundError:  # another process has moved it aside
        return False


def _format_in_use(folder: Path, default: ShardFormat) -> ShardFormat:
    try:
        return FORMATS.get(load_manifest(folder).format, default)
    except CacheError:
        return default


def _salvage(state: ShardState) -> tuple[Path | None, list[IndexEntry]]:
    """The shard and its entries. A damaged index is read as far as it can be: the entries' checksums decide, not it."""
    folder = state.index_file.parent
    if state.index is not None:
        return folder / state.index.shard, state.index.entries
    candidates = [state.index_file.with_suffix(form.suffix) for form in FORMATS.values()]
    shard = next((file for file in candidates if file.is_file()), None)
    try:
        content = json.loads(state.index_file.read_bytes())
        listed = content["entries"]
        return shard, [entry for entry in map(_entry_or_none, listed) if entry is not None]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return shard, []


def _entry_or_none(value: object) -> IndexEntry | None:
    try:
        return IndexEntry.model_validate(value)
    except ValidationError:
        return None


def _rewrite(shard: Path, entries: list[IndexEntry], safe: set[str], writer: CacheWriter) -> set[str]:
    """Copy the intact entries that stand nowhere else; returns their keys."""
    shard_format = next(form for form in FORMATS.values() if form.suffix == shard.suffix)
    intact, _ = check_entries(shard, shard_format, entries)
    wanted = [entry.key for entry in intact if entry.key not in safe]
    if wanted:
        reader = shard_format.open(shard)
        for key in wanted:
            writer.add(key, reader.read(key))
        reader.close()
    return set(wanted)


def _move_aside(folder: Path, file: Path) -> list[Path]:
    """Rename into `damaged/`; another repair at the same time may have done it already."""
    target = folder / DAMAGED / f"{file.name}.{secrets.token_hex(4)}"
    target.parent.mkdir(exist_ok=True)
    try:
        file.rename(target)
    except FileNotFoundError:
        return []
    return [target]


def _index_of(shard: Path) -> Path:
    return shard.with_suffix(".json")
