"""Opens a cache and reads features by key or by image path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cache.errors import CacheError
from cache.features import StoredFeatures, VisionFeatures
from cache.files import CacheFiles, LocalFiles
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS, ShardReader
from cache.index import EntryIndex, Location
from cache.index_table import ShardStamp
from cache.manifest import (
    MANIFEST_FILE,
    Grid,
    Manifest,
    SplitImages,
    load_manifest,
)
from cache.parts import commands_for
from cache.quantize import restore

# Which implementation resized the images may be left open when reading ("auto"); everything else must agree.
BACKEND_FIELDS = frozenset({"processor.backend", "processor.image_processor_type"})


class FeatureCache:
    """Features of one fingerprint, read at random. Safe to hand to worker processes: files are opened on first use.

    >>> cache = FeatureCache.open("runs/demo/features")
    >>> cache["images/lounge.jpg"].image_embeds.shape
    torch.Size([1280, 4096])
    """

    def __init__(self, folder: Path | CacheFiles, *, verify_checksums: bool = True) -> None:
        self.files = LocalFiles(folder) if isinstance(folder, Path) else folder
        self.manifest: Manifest = self.files.manifest()
        if self.manifest.format not in FORMATS:
            raise CacheError(
                f"shard format {self.manifest.format!r} is not known here",
                where=self.files.where,
                do=f"cache again in one of: {', '.join(FORMATS)}",
            )
        self._format = FORMATS[self.manifest.format]
        self._verify = verify_checksums
        self._index = self.files.index()
        self._paths: dict[str, set[str]] | None = None
        self._open: OrderedDict[str, ShardReader] = OrderedDict()

    @property
    def folder(self) -> Path:
        """The fingerprint's folder.

        Raises:
            CacheError: the cache lies at an address.
        """
        if isinstance(self.files, LocalFiles):
            return self.files.folder
        raise CacheError(
            "this needs a cache in a local folder", where=self.files.where, do="copy it, and set cache.dir to the copy"
        )

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
        return len(self._index)

    def __contains__(self, path_or_key: str) -> bool:
        return path_or_key in self._index or path_or_key in self._path_map()

    def __getitem__(self, path_or_key: str) -> VisionFeatures:
        """Features by key or by image path as the dataset names it.

        Raises:
            KeyError: it is neither.
            CacheError: the entry is damaged, or splits give this path to different images.
        """
        if path_or_key in self._index:
            return self.read(path_or_key)
        keys = self._path_map()[path_or_key]
        if len(keys) > 1:
            raise CacheError(
                f"the path {path_or_key} belongs to {len(keys)} different images, of different splits",
                where=self.files.where,
                do="look the image up by its key; `split(NAME).images` lists path and key",
            )
        return self.read(next(iter(keys)))

    def grid(self, key: str) -> Grid:
        """(t, h, w) of an entry, from the index alone."""
        return self._index[key].image_grid_thw

    def shard_of(self, key: str) -> ShardStamp:
        """The shard that an entry is read from.

        Raises:
            KeyError: no such entry.
        """
        return self._index.stamp_of(key)

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return self._index.keys()

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return self._index.num_bytes

    def by_shard(self) -> Iterator[tuple[str, list[str]]]:
        """File name of each shard with the keys that it gives, for reading everything shard after shard."""
        return self._index.by_shard()

    def split(self, name: str) -> SplitImages:
        """The image list of a split.

        Raises:
            CacheError: the split has not been cached, or not completely.
        """
        images = self.files.split(name)
        if images is None:
            advice = self.files.advice(commands_for(name, [], 1))
            raise CacheError(f"split {name!r} has not been cached yet", where=self.files.where, do=advice)
        missing = [image for image in images.images if image.key not in self._index]
        if missing:
            commands = commands_for(name, [image.key for image in missing], images.num_parts)
            raise CacheError(
                f"split {name!r} is not complete: {len(missing)} of {len(images.images)} images are missing, "
                f"e.g. {missing[0].path}",
                where=self.files.where,
                do=self.files.advice(f"{commands} again: it goes on where it was"),
            )
        return images

    def out_bytes(self, key: str) -> int:
        """How many bytes `read` needs of its `out` for an entry.

        Raises:
            KeyError, CacheError: see `read`.
        """
        location = self._index[key]
        try:
            return self._shard(key, location).extents(key).out_bytes
        except (KeyError, ValueError, OSError) as error:
            raise self._damaged(location, key, str(error)) from error

    def read(self, key: str, out: torch.Tensor | None = None) -> VisionFeatures:
        """The features of a key, on the CPU, in the manifest's `dtype`; a quantised entry is dequantised.

        Args and errors: see `read_stored`; dequantised features have memory of their own.
        """
        return restore(self.read_stored(key, out), self.manifest.compute_dtype)

    def read_stored(self, key: str, out: torch.Tensor | None = None) -> StoredFeatures:
        """The entry of a key as it is stored, on the CPU.

        Args:
            out: contiguous uint8 memory of at least `out_bytes(key)` that the features are read into and share from
                then on, e.g. pinned; reused memory is read into faster than fresh memory. Default: memory of their own.

        Raises:
            KeyError: no such entry.
            CacheError: the shard is missing or damaged.
            TypeError: `out` is not such memory.
        """
        location = self._index[key]
        try:
            shard = self._shard(key, location)
            if self._verify:
                features, found = shard.read_checked(key, out)
            else:
                features, found = shard.read(key, out), location.checksum
        except KeyError as error:
            raise self._damaged(location, key, "it is not in the shard") from error
        except (ValueError, OSError) as error:
            raise self._damaged(location, key, str(error)) from error
        if not self._fits(features, location):
            raise self._damaged(location, key, "its shape or dtype is not the one that manifest and index state")
        if found != location.checksum:
            raise self._damaged(location, key, "its bytes do not match the checksum")
        return features

    def _shard(self, key: str, location: Location) -> ShardReader:
        name = location.shard
        reader = self._open.get(name)
        if reader is None:
            stamp = self._index.stamp_of(key)
            reader = self._open[name] = self._format.open_file(self.files.shard(stamp))
            if len(self._open) > self.files.max_open_shards:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(name)
        return reader

    def _fits(self, features: StoredFeatures, location: Location) -> bool:
        levels, _, width = features.deepstack_features.shape
        return (
            features.image_embeds.dtype == self.manifest.stored_dtype
            and (levels, width) == (self.manifest.num_deepstack_levels, self.manifest.hidden_size)
            and tuple(features.image_grid_thw.tolist()) == location.image_grid_thw
        )

    def _damaged(self, location: Location, key: str, reason: str) -> CacheError:
        return self.files.damaged(location.shard, f"entry {key[:12]}... cannot be read: {reason}")

    def _path_map(self) -> dict[str, set[str]]:
        """Path -> keys of the entries; more than one where splits have different image roots."""
        if self._paths is None:
            self._paths = {}
            for name in self.files.split_names():
                listed = self.files.split(name)
                for image in listed.images if listed else []:
                    if image.key in self._index:
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
        raise unreadable[0] if unreadable else _no_cache(root)
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


def _no_cache(root: Path) -> CacheError:
    return CacheError("there is no cache here", where=str(root), do="run `pipeline cache --split train` first")
