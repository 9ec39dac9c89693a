"""Opens a cache and reads features by key or by image path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cache.errors import CacheError
from cache.features import StoredFeatures, VisionFeatures
from cache.files import CacheFiles, LocalFiles, fingerprint_folders, no_cache
from cache.formats import FORMATS, ShardReader
from cache.index import Location
from cache.index_table import ShardStamp
from cache.manifest import MANIFEST_FILE, Manifest
from cache.parts import commands_for
from cache.quantize import restore
from cache.split_images import Grid, SplitImages


class FeatureCache:
    """Features of one fingerprint, read at random, by any number of threads.

    Safe to hand to worker processes: files are opened on first use.

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
                raise no_cache(root)
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

    def shards_of(self, keys: Sequence[str]) -> list[ShardStamp]:
        """The shards that so many entries are read from, each once.

        Raises:
            KeyError: one of them is no entry.
        """
        return self._index.stamps_of(keys)

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
        missing = [images.images[n] for n in self._index.missing([image.key for image in images.images])]
        if missing:
            commands = commands_for(name, [image.key for image in missing], images.num_parts)
            raise CacheError(
                f"split {name!r} is not complete: {len(missing)} of {len(images.images)} images are missing, "
                f"e.g. {missing[0].path}",
                where=self.files.where,
                do=self.files.advice(
                    f"{commands} again: it goes on where it was, and takes up what an interrupted run left"
                ),
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
        with suppress(KeyError):  # other threads may let go of shards at the same time, of this one too
            self._open.move_to_end(name)
            if len(self._open) > self.files.max_open_shards:
                self._open.popitem(last=False)  # closes itself once no thread reads from it any more
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
