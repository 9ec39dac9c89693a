"""Opens a cache and reads features by key or by image path."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache.errors import CacheError
from cache.features import VisionFeatures
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS, ShardReader
from cache.formats.base import checksum
from cache.manifest import (
    MANIFEST_FILE,
    SHARDS,
    SPLITS,
    Grid,
    Manifest,
    SplitImages,
    damaged_shard,
    load_manifest,
    load_shard_indexes,
    load_split,
)

MAX_OPEN_SHARDS = 64
# Which implementation resized the images may be left open when reading ("auto"); everything else must agree.
BACKEND_FIELDS = frozenset({"processor.backend", "processor.image_processor_type"})


@dataclass(frozen=True, slots=True)
class Location:
    """Where an entry lies."""

    shard: str
    image_grid_thw: Grid
    checksum: str


class FeatureCache:
    """Features of one fingerprint, read at random. Safe to hand to worker processes: files are opened on first use.

    >>> cache = FeatureCache.open("runs/demo/features")
    >>> cache["images/lounge.jpg"].image_embeds.shape
    torch.Size([1280, 4096])
    """

    def __init__(self, folder: Path, *, verify_checksums: bool = True) -> None:
        self.folder = folder
        self.manifest: Manifest = load_manifest(folder)
        if self.manifest.format not in FORMATS:
            raise CacheError(
                f"shard format {self.manifest.format!r} is not known here",
                where=str(folder),
                do=f"cache again in one of: {', '.join(FORMATS)}",
            )
        self._format = FORMATS[self.manifest.format]
        self._verify = verify_checksums
        self._locations = {
            entry.key: Location(index.shard, entry.image_grid_thw, entry.checksum)
            for index in load_shard_indexes(folder)
            for entry in index.entries
        }
        self._paths: dict[str, set[str]] | None = None
        self._open: OrderedDict[str, ShardReader] = OrderedDict()

    @classmethod
    def open(cls, folder: str | Path, *, verify_checksums: bool = True) -> FeatureCache:
        """Open a cache folder that holds one fingerprint, or a fingerprint's own folder.

        Raises:
            CacheError: there is no cache, or there are several (then name the folder of one).
        """
        root = Path(folder)
        found = fingerprint_folders(root)
        if (root / MANIFEST_FILE).is_file():
            found = [root]
        if len(found) != 1:
            if not found:
                raise _no_cache(root)
            listing = ", ".join(str(f) for f in found)
            raise CacheError(f"there are {len(found)} caches here: {listing}", where=str(root), do="name one of them")
        return cls(found[0], verify_checksums=verify_checksums)

    def __len__(self) -> int:
        return len(self._locations)

    def __contains__(self, path_or_key: str) -> bool:
        return path_or_key in self._locations or path_or_key in self._path_map()

    def __getitem__(self, path_or_key: str) -> VisionFeatures:
        """Features by key or by image path as the dataset names it.

        Raises:
            KeyError: it is neither.
            CacheError: the entry is damaged, or splits give this path to different images.
        """
        if path_or_key in self._locations:
            return self.read(path_or_key)
        keys = self._path_map()[path_or_key]
        if len(keys) > 1:
            raise CacheError(
                f"the path {path_or_key} belongs to {len(keys)} different images, of different splits",
                where=str(self.folder),
                do="look the image up by its key; `split(NAME).images` lists path and key",
            )
        return self.read(next(iter(keys)))

    def grid(self, key: str) -> Grid:
        """(t, h, w) of an entry, from the index alone."""
        return self._locations[key].image_grid_thw

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted(self._locations)

    def split(self, name: str) -> SplitImages:
        """The image list of a split.

        Raises:
            CacheError: the split has not been cached, or not completely.
        """
        images = load_split(self.folder, name)
        command = f"pipeline cache --split {name}"
        if images is None:
            raise CacheError(f"split {name!r} has not been cached yet", where=str(self.folder), do=f"run `{command}`")
        missing = [image.path for image in images.images if image.key not in self._locations]
        if missing:
            raise CacheError(
                f"split {name!r} is not complete: {len(missing)} of {len(images.images)} images are missing, "
                f"e.g. {missing[0]}",
                where=str(self.folder),
                do=f"run `{command}` again: it goes on where it was",
            )
        return images

    def read(self, key: str) -> VisionFeatures:
        """The entry of a key, on the CPU.

        Raises:
            KeyError: no such entry.
            CacheError: the shard is missing or damaged.
        """
        location = self._locations[key]
        try:
            features = self._shard(location.shard).read(key)
        except KeyError as error:
            raise self._damaged(location, key, "it is not in the shard") from error
        except (ValueError, OSError) as error:
            raise self._damaged(location, key, str(error)) from error
        if not self._fits(features, location):
            raise self._damaged(location, key, "its shape or dtype is not the one that manifest and index state")
        if self._verify and checksum(features) != location.checksum:
            raise self._damaged(location, key, "its bytes do not match the checksum")
        return features

    def _shard(self, name: str) -> ShardReader:
        reader = self._open.get(name)
        if reader is None:
            reader = self._open[name] = self._format.open(self.folder / SHARDS / name)
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(name)
        return reader

    def _fits(self, features: VisionFeatures, location: Location) -> bool:
        levels, _, width = features.deepstack_features.shape
        return (
            features.image_embeds.dtype == getattr(torch, self.manifest.dtype)
            and (levels, width) == (self.manifest.num_deepstack_levels, self.manifest.hidden_size)
            and tuple(features.image_grid_thw.tolist()) == location.image_grid_thw
        )

    def _damaged(self, location: Location, key: str, reason: str) -> CacheError:
        return damaged_shard(self.folder / SHARDS / location.shard, f"entry {key[:12]}... cannot be read: {reason}")

    def _path_map(self) -> dict[str, set[str]]:
        """Path -> keys of the entries; more than one where splits have different image roots."""
        if self._paths is None:
            self._paths = {}
            for file in sorted((self.folder / SPLITS).glob("*.json")):
                listed = load_split(self.folder, file.stem)
                for image in listed.images if listed else []:
                    if image.key in self._locations:
                        self._paths.setdefault(image.path, set()).add(image.key)
        return self._paths

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


def fingerprint_folders(root: Path) -> list[Path]:
    """The folders below `root` that hold a manifest."""
    return sorted(path.parent for path in root.glob(f"*/{MANIFEST_FILE}"))


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
    if len(matching) == 1:
        return FeatureCache(matching[0], verify_checksums=verify_checksums)
    if matching:
        raise CacheError(
            f"two image processor backends have cached here: {', '.join(f.name for f in matching)}",
            where=str(root),
            do="choose one with cache.image_processor_backend",
        )
    if not others:
        raise unreadable[0] if unreadable else _no_cache(root)
    differences, folder = min(others, key=lambda other: len(other[0]))
    raise CacheError(
        f"no cache here was made by this model and these settings; the nearest, {folder.name}, differs in\n    "
        + "\n    ".join(differences),
        where=str(root),
        do="change the setting back, or run `pipeline cache` for the new one (nothing is overwritten)",
    )


def _no_cache(root: Path) -> CacheError:
    return CacheError("there is no cache here", where=str(root), do="run `pipeline cache --split train` first")
