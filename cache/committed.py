"""Which images the cache of a configuration holds already, told before anything is spent."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, ModelConfig
from cache.errors import CacheError
from cache.files import LocalFiles, fingerprint_folders
from cache.fingerprint import Fingerprint
from cache.index import EntryIndex
from cache.keys import image_key
from cache.manifest import folder_name, load_manifest
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import ImageRef
from cache.split_lists import same_root

THREADS = 8  # reading and hashing release the GIL


@dataclass(frozen=True, slots=True)
class Place:
    """One of the places where an image stands.

    Attributes:
        root: what the split's names are relative to.
        num_bytes: of the encoded image.
    """

    split: str
    root: str
    ref: ImageRef
    num_bytes: int


class Committed:
    """The entries that `pipeline cache` would find; none where nothing was cached for this fingerprint.

    Args:
        folder: of the fingerprint and format; None where there is none.

    Raises:
        CacheError: an index or a list is damaged; `pipeline cache` would say so too.
    """

    def __init__(self, folder: Path | None) -> None:
        self._index = EntryIndex.open(folder) if folder is not None else None
        files = LocalFiles(folder) if folder is not None else None
        lists = [files.split(name) for name in files.split_names()] if files is not None else []
        self._roots = {one.split: one.root for one in lists if one is not None}
        self._listed = {(one.split, image.path): image for one in lists if one is not None for image in one.images}
        self._sizes = {image.size for image in self._listed.values()}

    @classmethod
    def find(cls, model: ModelConfig, cache: CacheConfig, processor: ImageProcessor, cache_dir: Path) -> Committed:
        """Of a configuration. The tower's tensors are read only where a cache differs in nothing but them, if at all.

        Raises:
            CacheError: see the class.
            ConfigError: the checkpoint has no weights that can be read, and the cache was made otherwise alike.
        """
        vision_config = load_hf_config(model).vision_config

        def fingerprint(weights: VisionWeights) -> Fingerprint:
            return Fingerprint.of(weights=weights, vision_config=vision_config, processor=processor, cache=cache)

        unknown = fingerprint(VisionWeights({}))
        if not any(_agrees(folder, unknown, cache.format) for folder in fingerprint_folders(cache_dir)):
            return cls(None)
        folder = cache_dir / folder_name(fingerprint(VisionWeights.find(model)).name, cache.format)
        return cls(folder if folder.is_dir() else None)

    def among(self, images: Mapping[Hashable, Iterable[Place]], progress: Progress) -> frozenset[Hashable]:
        """Those of some distinct images that are committed.

        A file that is listed with its size and modification time is not read. Of the others those are read and hashed
        that have the size of a listed one: under another name, too, an image is the same.

        Args:
            images: what stands for the content of each -> where it stands.

        Raises:
            DataError, ReadError: an image cannot be read any more.
        """
        index = self._index
        if index is None:
            return frozenset()
        progress.start("looking for cached images", len(images), "image")
        found = []
        with ThreadPoolExecutor(THREADS) as pool:
            keys = pool.map(lambda places: self._key(list(places)), images.values())
            for name, key in zip(images, keys, strict=True):
                if key is not None and key in index:
                    found.append(name)
                progress.advance()
        progress.finish()
        return frozenset(found)

    def _key(self, places: list[Place]) -> str | None:
        """The key of an image; None where it cannot be committed."""
        for place in places:
            listed, stamp = self._listed.get((place.split, place.ref.path)), place.ref.stamp()
            if listed is None or stamp is None or not stamp.mtime_ns:
                continue
            unchanged = (stamp.size, stamp.mtime_ns) == (listed.size, listed.mtime_ns)
            if unchanged and same_root(self._roots[place.split], place.root):
                return listed.key
        return image_key(places[0].ref.read()) if places[0].num_bytes in self._sizes else None


def _agrees(folder: Path, wanted: Fingerprint, shard_format: str) -> bool:
    """Whether a cache was made as `wanted` says, whatever the weights."""
    try:
        manifest = load_manifest(folder)
    except CacheError:  # of another format version, or damaged: `pipeline cache` will say so if it is the one to use
        return False
    differences = Fingerprint(manifest.fingerprint).differences(wanted, ignore=frozenset({"vision_weights"}))
    return manifest.format == shard_format and not differences
