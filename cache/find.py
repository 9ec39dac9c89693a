"""Which of the caches in a folder was made as a configuration says."""

from __future__ import annotations

from pathlib import Path

from cache.errors import CacheError
from cache.files import fingerprint_folders, no_cache
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.index import EntryIndex
from cache.manifest import load_manifest
from cache.reader import FeatureCache

# Which implementation resized the images may be left open when reading ("auto"); everything else must agree.
BACKEND_FIELDS = frozenset({"processor.backend", "processor.image_processor_type"})


def find_cache(root: Path, wanted: Fingerprint, *, any_backend: bool, verify_checksums: bool = True) -> FeatureCache:
    """The cache below `root` that was made as `wanted` says.

    Args:
        any_backend: take whichever image processor backend made it.

    Raises:
        CacheError: there is none (says what differs), or there are several with `any_backend`.
    """
    ignore = BACKEND_FIELDS if any_backend else frozenset()
    others: list[tuple[list[str], Path]] = []
    unreadable: list[CacheError] = []
    matching = []
    for folder in fingerprint_folders(root):
        try:
            manifest = load_manifest(folder)
        except CacheError as error:  # of another format version, or damaged: no matter if another one fits
            unreadable.append(error)
            continue
        differences = Fingerprint(manifest.fingerprint).differences(wanted, ignore=ignore)
        if differences:
            others.append((differences, folder))
        else:
            matching.append(folder)
    matching = _one_format_each(matching)
    if len(matching) == 1:
        return FeatureCache(matching[0], verify_checksums=verify_checksums)
    if matching:
        raise CacheError(
            f"two image processor backends have cached here: {', '.join(f.name for f in matching)}",
            where=str(root),
            do="choose one with cache.image_processor_backend",
        )
    if not others:
        raise unreadable[0] if unreadable else no_cache(root)
    differences, folder = min(others, key=lambda other: len(other[0]))
    raise CacheError(
        f"no cache here was made by this model and these settings; the nearest, {folder.name}, differs in\n    "
        + "\n    ".join(differences),
        where=str(root),
        do="change the setting back, or run `pipeline cache` for the new one (nothing is overwritten)",
    )


def _one_format_each(folders: list[Path]) -> list[Path]:
    """Of copies of one fingerprint in several formats the one to read: the most entries, then the order of FORMATS.

    They hold the same numbers, and a copy that `pipeline repack` has not finished yet holds fewer.
    """
    copies: dict[str, list[Path]] = {}
    for folder in folders:
        copies.setdefault(Fingerprint(load_manifest(folder).fingerprint).name, []).append(folder)
    return [found[0] if len(found) == 1 else max(found, key=_merit) for found in copies.values()]


def _merit(folder: Path) -> tuple[int, int]:
    formats = list(FORMATS)
    written_in = load_manifest(folder).format
    order = formats.index(written_in) if written_in in formats else len(formats)
    return len(EntryIndex.open(folder)), -order
