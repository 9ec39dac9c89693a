"""What lies in a cache folder, by fingerprint, and the removal of what is asked for. Nothing is removed unasked."""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.atomic import TEMPORARY_MARK
from cache.errors import CacheError, ConfigError
from cache.find import BACKEND_FIELDS
from cache.fingerprint import Fingerprint
from cache.manifest import MANIFEST_FILE, SHARDS, SPLITS, Manifest, load_manifest, load_shard_index
from cache.repair import DAMAGED, STALE_SECONDS, shards_without_index

_NAME = re.compile(r"[0-9a-f]{16}")
_SHOWN_FIELDS = (
    *("processor.min_pixels", "processor.max_pixels", "processor.backend", "processor.device"),
    *("tower", "attn_implementation", "storage_dtype"),
)


@dataclass(frozen=True, slots=True)
class Holding:
    """What a fingerprint's folder holds.

    Attributes:
        manifest: None when it is missing or damaged.
        num_images: distinct ones, of the indexes that can be read.
        num_bytes: of all files.
        splits: names of the image lists.
        in_use: whether the present configuration reads it.
        temporary: half-written files, of writers at work or killed.
        stale: those of `temporary` older than an hour.
        damaged: files that a repair has moved aside.
        unlisted: shards older than an hour without an index or a journal; a repair moves them aside.
    """

    folder: Path
    manifest: Manifest | None
    num_images: int
    num_bytes: int
    splits: list[str]
    in_use: bool
    temporary: list[Path]
    stale: list[Path]
    damaged: list[Path]
    unlisted: list[Path]

    def describe(self) -> str:
        """In lines for a person."""
        if self.manifest is None:
            made = "    the manifest is missing or damaged"
        else:
            fields = self.manifest.fingerprint
            shown = ", ".join(f"{n.removeprefix('processor.')} {fields[n]}" for n in _SHOWN_FIELDS if n in fields)
            made = (
                f"    model {self.manifest.made_by.get('model', 'unknown')}, {self.manifest.dtype}, "
                f"{self.manifest.format}\n    {shown}"
            )
        lines = [
            f"{self.folder.name}  {'used by this configuration' if self.in_use else 'not used by this configuration'}",
            made,
            f"    {self.num_images} images, {self.num_bytes / 1e6:.2f} MB, splits: {', '.join(self.splits) or 'none'}",
        ]
        for what, files in (
            (f"temporary files, {len(self.stale)} of them older than an hour", self.temporary),
            ("damaged files that were moved aside", self.damaged),
            ("shards without an index, which do not count (`pipeline cache --repair` moves them aside)", self.unlisted),
        ):
            if files:
                lines.append(f"    {len(files)} {what}: {total_bytes(files) / 1e6:.2f} MB")
        return "\n".join(lines)


def survey_holdings(cache_dir: Path, wanted: Fingerprint, *, any_backend: bool) -> list[Holding]:
    """Everything in a cache folder that is a fingerprint's, whole or in remains, by name.

    Args:
        wanted: the present configuration's.
        any_backend: the configuration reads whichever image processor backend made the features.
    """
    ignore = BACKEND_FIELDS if any_backend else frozenset[str]()
    folders = sorted(cache_dir.iterdir()) if cache_dir.is_dir() else []
    return [
        _holding(folder, wanted, ignore)
        for folder in folders
        if folder.is_dir()
        and not folder.is_symlink()
        and (_NAME.fullmatch(folder.name) or (folder / MANIFEST_FILE).is_file())
    ]


def remove_fingerprint(holdings: Sequence[Holding], name: str) -> Holding:
    """Delete one fingerprint's folder with everything in it.

    Raises:
        ConfigError: none of the holdings has this name.
        CacheError: something cannot be deleted.
    """
    for holding in holdings:
        if holding.folder.name == name:
            try:
                # The manifest first: if this is cut short, what is left is no cache.
                (holding.folder / MANIFEST_FILE).unlink(missing_ok=True)
                shutil.rmtree(holding.folder)
            except OSError as error:
                raise _cannot_delete(error) from error
            return holding
    names = ", ".join(holding.folder.name for holding in holdings) or "none"
    raise ConfigError(f"there is no fingerprint {name!r} in this cache", do=f"give one of: {names}")


def remove_leftovers(holdings: Sequence[Holding]) -> list[Path]:
    """Delete stale temporary files and what repairs have moved aside; returns what was deleted.

    Raises:
        CacheError: something cannot be deleted.
    """
    files = [file for holding in holdings for file in (*holding.stale, *holding.damaged)]
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_delete(error) from error
    return files


def total_bytes(files: Sequence[Path]) -> int:
    """Of the files that are (still) there."""
    return sum(status.st_size for _, status in _still_there(files))


def _still_there(files: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files, without links; one that another process has renamed or removed meanwhile is passed over."""
    for file in files:
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield file, status


def _holding(folder: Path, wanted: Fingerprint, ignore: frozenset[str]) -> Holding:
    manifest = _or_none(load_manifest, folder)
    indexes = (_or_none(load_shard_index, file) for file in (folder / SHARDS).glob("*.json"))
    keys = {entry.key for index in indexes if index is not None for entry in index.entries}
    listed = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    files = dict(_still_there(listed))
    temporary = [file for file in files if TEMPORARY_MARK in file.name]
    old = time.time() - STALE_SECONDS
    in_use = folder.name == wanted.name or (
        manifest is not None and not Fingerprint(manifest.fingerprint).differences(wanted, ignore=ignore)
    )
    return Holding(
        folder=folder,
        manifest=manifest,
        num_images=len(keys),
        num_bytes=sum(status.st_size for status in files.values()),
        splits=sorted(file.stem for file in (folder / SPLITS).glob("*.json")),
        in_use=in_use,
        temporary=temporary,
        stale=[file for file in temporary if files[file].st_mtime < old],
        damaged=sorted(file for file in files if file.parent == folder / DAMAGED),
        unlisted=shards_without_index(folder),
    )


def _or_none(load: Any, path: Path) -> Any:
    try:
        return load(path)
    except CacheError:
        return None


def _cannot_delete(error: OSError) -> CacheError:
    return CacheError(
        f"cannot be deleted: {error.strerror or error}",
        where=str(error.filename) if error.filename else None,
        do="check its permissions, then run the same command again",
    )
