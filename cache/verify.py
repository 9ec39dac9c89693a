"""Reads everything that a cache has committed and compares it with its checksums. Changes nothing, stops at nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cache.errors import CacheError
from cache.formats import FORMATS, ShardFormat
from cache.formats.base import file_checksum
from cache.index import index_file_damage
from cache.index_file import INDEX_FILE
from cache.manifest import (
    MANIFEST_FILE,
    REFUSED,
    SHARDS,
    SPLITS,
    IndexEntry,
    Manifest,
    ShardIndex,
    load_manifest,
    load_shard_index,
)
from cache.parts import commands_for
from cache.progress import Progress
from cache.seal import seal_holds
from cache.split_files import load_refused_image, load_split
from cache.split_images import SplitImages

_T = TypeVar("_T")
THREADS = 2  # checksums run at memory speed: two keep a disk busy


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not as it was written.

    Attributes:
        file: the shard, index, manifest or list.
        what: what is wrong.
    """

    file: Path
    what: str


@dataclass(slots=True)
class ShardState:
    """What was found about one shard.

    Attributes:
        index_file: its index.
        index: of a damaged shard; None when it cannot be read. Of an intact one only the keys are kept: a cache may
            have a million entries.
        damages: of the index or of the shard.
        intact: the keys of the entries that match their checksum.
        num_bytes: of the shard, as its index states it.
    """

    index_file: Path
    index: ShardIndex | None = None
    damages: list[Damage] = field(default_factory=list)
    intact: list[str] = field(default_factory=list)
    num_bytes: int = 0


@dataclass(slots=True)
class Verification:
    """The outcome.

    Attributes:
        folder: of the fingerprint.
        shards: every committed shard that was looked at.
        damages: of everything else.
        missing: split -> the images (path, key) that no intact entry is there for.
        num_parts: split -> among how many parts its images are divided.
    """

    folder: Path
    shards: list[ShardState] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    missing: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    num_parts: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of the shards that were read."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def intact_keys(self) -> set[str]:
        """The keys of which an intact entry is there."""
        return {key for shard in self.shards for key in shard.intact}

    def all_damages(self) -> list[Damage]:
        """Everything that is not as it was written."""
        return [*self.damages, *(damage for shard in self.shards for damage in shard.damages)]

    def require_sound(self) -> None:
        """Raise unless everything is intact and complete.

        Raises:
            CacheError: lists the damaged files, what is missing, and the commands that mend it.
        """
        damages = self.all_damages()
        lines = [f"{damage.file.relative_to(self.folder)}: {damage.what}" for damage in damages]
        incomplete = {split: images for split, images in self.missing.items() if images}
        for split, images in incomplete.items():
            count = len({key for _, key in images})
            lines.append(f"split {split}: {count} images have no intact entry, e.g. {images[0][0]}")
        if not lines:
            return
        if damages:
            name = next(iter(incomplete or self.missing), "NAME")
            commands = [f"`pipeline cache --repair --split {name}`"]
            commands += [
                commands_for(s, [k for _, k in i], self.num_parts[s]) for s, i in incomplete.items() if s != name
            ]
        else:
            commands = [commands_for(s, [k for _, k in i], self.num_parts[s]) for s, i in incomplete.items()]
        raise CacheError(
            f"{len(damages)} damaged files, {len(incomplete)} incomplete splits\n    " + "\n    ".join(lines),
            where=str(self.folder),
            do=f"run {', then '.join(commands)}",
        )


def verify_cache(folder: Path, progress: Progress, *, split: str | None = None) -> Verification:
    """Check manifest, lists, indexes and shards of one fingerprint.

    Args:
        split: look only at this split's list and at the shards that hold images of it. A damaged list names no images:
            then all shards are looked at.

    Raises:
        CacheError: there is no cache in `folder`, or `split` has not been cached.
    """
    if not (folder / SHARDS).is_dir():
        raise CacheError("there is no cache here", where=str(folder), do="run `pipeline cache` first")
    found = Verification(folder)
    manifest = read_or_note(folder / MANIFEST_FILE, lambda _: load_manifest(folder), found.damages)
    splits = _check_splits(found, split)
    for file in sorted((folder / REFUSED).glob("*.json")):
        read_or_note(file, load_refused_image, found.damages)
    reason = index_file_damage(folder)
    if reason is not None:
        found.damages.append(Damage(folder / INDEX_FILE, reason))
    wanted = None if split is None or not splits else {image.key for listed in splits for image in listed.images}
    files = sorted((folder / SHARDS).glob("*.json"))
    progress.start("verifying shards", len(files), "shard")
    with ThreadPoolExecutor(THREADS) as pool:
        for state in pool.map(lambda file: _check_shard(file, manifest, wanted), files):
            progress.advance()
            if state is not None:
                found.shards.append(state)
    progress.finish()
    intact = found.intact_keys
    for listed in splits:
        found.num_parts[listed.split] = listed.num_parts
        found.missing[listed.split] = [(i.path, i.key) for i in listed.images if i.key not in intact]
    return found


def read_or_note(file: Path, load: Callable[[Path], _T], damages: list[Damage]) -> _T | None:
    """What a JSON file of the cache says; None and a note when it is damaged or bears no digest."""
    try:
        document = load(file)
        if seal_holds(file.read_bytes()) is not True:
            raise CacheError(
                "it bears no digest, so that it cannot be checked; it was edited or made by another program",
                do="run `pipeline cache --repair`",
            )
    except (CacheError, OSError) as error:
        damages.append(Damage(file, error.what if isinstance(error, CacheError) else str(error)))
        return None
    return document


def _check_splits(found: Verification, split: str | None) -> list[SplitImages]:
    files = sorted((found.folder / SPLITS).glob("*.json"))
    if split is not None:
        files = [file for file in files if file.stem == split]
        if not files:
            raise CacheError(
                f"split {split!r} has not been cached yet",
                where=str(found.folder),
                do=f"run {commands_for(split, [], 1)}",
            )
    listed = [read_or_note(f, lambda f: load_split(found.folder, f.stem), found.damages) for f in files]
    return [images for images in listed if images is not None]


def _check_shard(file: Path, manifest: Manifest | None, wanted: Collection[str] | None) -> ShardState | None:
    """One shard and its index; None when it holds nothing that is wanted."""
    state = ShardState(file)
    state.index = read_or_note(file, load_shard_index, state.damages)
    if state.index is None:
        return state
    if wanted is not None and not any(entry.key in wanted for entry in state.index.entries):
        return None
    shard = file.parent / state.index.shard
    # Only the format of an intact manifest, or else the suffix, says how to read it.
    shard_format = _format_of(manifest, shard)
    reasons = _check_file(shard, state.index)
    if shard_format is not None and shard.is_file():
        intact, wrong = check_entries(shard, shard_format, state.index.entries)
        state.intact = [entry.key for entry in intact]
        reasons += wrong
    state.num_bytes = state.index.num_bytes
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        state.damages.append(Damage(shard, f"{reasons[0]}{more}"))
    if not state.damages:
        state.index = None
    return state


def _check_file(shard: Path, index: ShardIndex) -> list[str]:
    """What is wrong with the file as a whole: only this finds damage where no entry lies, e.g. in padding."""
    if not shard.is_file():
        return ["it is missing"]
    try:
        size = shard.stat().st_size
        if size != index.num_bytes:
            return [f"it has {size} bytes instead of {index.num_bytes}"]
        if file_checksum(shard) != index.checksum:
            return ["its bytes do not match the checksum of the whole file"]
    except OSError as error:
        return [f"it cannot be read: {error.strerror or error}"]
    return []


def check_entries(
    shard: Path, shard_format: ShardFormat, entries: Sequence[IndexEntry]
) -> tuple[list[IndexEntry], list[str]]:
    """The entries of a shard that are as they were written, and what is wrong with each of the others."""
    intact, wrong = [], []
    try:
        reader = shard_format.open(shard)
    except (ValueError, OSError) as error:
        return [], [f"it cannot be opened: {error}"]
    try:
        for entry in entries:
            try:
                features, found = reader.read_checked(entry.key)
            except (ValueError, OSError, KeyError) as error:
                wrong.append(f"entry {entry.key[:12]}... cannot be read: {error}")
                continue
            grid = tuple(features.image_grid_thw.tolist())
            if grid == entry.image_grid_thw and found == entry.checksum:
                intact.append(entry)
            else:
                wrong.append(f"entry {entry.key[:12]}... does not match its checksum")
    finally:
        reader.close()
    return intact, wrong


def _format_of(manifest: Manifest | None, shard: Path) -> ShardFormat | None:
    if manifest is not None:
        return FORMATS.get(manifest.format)
    return next((one for one in FORMATS.values() if one.suffix == shard.suffix), None)
