"""What a cache folder says about itself: the manifest, and an index for each shard. All JSON, all checked.

Layout of `<cache.dir>/<fingerprint>/` (docs/cache-format.md is the specification):
    manifest.json           what made the features, and their shape
    entries.index           all entries of all shards, to open faster (cache.index_file); may be missing or old
    shards/NAME.SUFFIX      features
    shards/NAME.json        index of that shard; written after it, so a shard without an index does not count
    splits/SPLIT.json       the images of a split: path -> key (cache.split_files)
    refused/KEY.json        an image that a part of several could not decode (cache.split_files)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, StringConstraints

from cache.config import StorageDtype
from cache.documents import Document, FileDocument, load, save
from cache.errors import CacheError
from cache.features import QUANTIZED_DTYPES, SCALE_DTYPE
from cache.fingerprint import FORMAT_VERSION, Fingerprint
from cache.keys import Key

MANIFEST_FILE = "manifest.json"
SHARDS, SPLITS, REFUSED = "shards", "splits", "refused"


class Manifest(FileDocument):
    """What made the features, and their shape."""

    format_version: int
    format: str
    dtype: Literal["bfloat16", "float16", "float32"]
    hidden_size: int = Field(gt=0)
    num_deepstack_levels: int = Field(ge=0)
    storage_dtype: StorageDtype = "same"
    fingerprint: dict[str, Any]
    made_by: dict[str, str]

    def bytes_per_token(self) -> int:
        """Bytes that one merged image token takes, all levels together."""
        width = self.stored_dtype.itemsize
        scale = 0 if self.storage_dtype == "same" else SCALE_DTYPE.itemsize
        return (width * self.hidden_size + scale) * (1 + self.num_deepstack_levels)

    @property
    def compute_dtype(self) -> torch.dtype:
        """In which the language model gets the features."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the numbers in the shards."""
        return QUANTIZED_DTYPES.get(self.storage_dtype, self.compute_dtype)


class _Versioned(Document):
    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: int


class IndexEntry(Document):
    """One image of a shard."""

    key: Key
    image_grid_thw: tuple[int, int, int]
    checksum: str


class ShardIndex(FileDocument):
    """The entries of one shard. `checksum` is XXH3-128 over the shard's whole file, in hex."""

    shard: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    num_bytes: int = Field(ge=0)
    checksum: str = ""
    entries: list[IndexEntry]


def folder_name(fingerprint: str, shard_format: str) -> str:
    """Name of the folder that holds a fingerprint's features in a format; the default format's bears no suffix."""
    return fingerprint if shard_format == "safetensors" else f"{fingerprint}-{shard_format}"


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest where there is none; where there is one it must be for the same fingerprint and format.

    Raises:
        CacheError: it is for another one; says what differs.
        ResourceError: the disk is full.
    """
    target = folder / MANIFEST_FILE
    for part in (SHARDS, SPLITS):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if target.exists():
        there = load_manifest(folder)
        have, want = ({**m.fingerprint, "format": m.format} for m in (there, manifest))
        differences = Fingerprint(have).differences(Fingerprint(want))
        if differences:
            raise CacheError(
                "holds features made otherwise: " + "; ".join(differences),
                where=str(target),
                do="give another cache.dir",
            )
        return
    save(target, manifest, indent=1)


def load_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CacheError: it is missing, damaged, or of another format version.
    """
    # The version is looked at first: another version's manifest may have other fields.
    version = load(folder / MANIFEST_FILE, _Versioned, sealed=False).format_version
    if version != FORMAT_VERSION:
        raise CacheError(
            f"has format version {version}; this program reads version {FORMAT_VERSION}",
            where=str(folder / MANIFEST_FILE),
            do="run `pipeline cache` again into another cache.dir, or use the program version that made it",
        )
    return load(folder / MANIFEST_FILE, Manifest)


def save_shard_index(folder: Path, index: ShardIndex) -> None:
    """Commit a shard: from now on its entries count."""
    save(index_file(folder, index.shard), index)


def load_shard_indexes(folder: Path) -> list[ShardIndex]:
    """The indexes of all committed shards, in the order of their names. Looks at the shards' sizes, opens none.

    Raises:
        CacheError: an index is damaged, or its shard is missing or has another size.
    """
    indexes = [load_shard_index(path) for path in sorted((folder / SHARDS).glob("*.json"))]
    for index in indexes:
        shard = folder / SHARDS / index.shard
        check_shard_size(shard, shard.stat().st_size if shard.is_file() else None, index.num_bytes)
    return indexes


def check_shard_size(shard: Path, size: int | None, expected: int) -> None:
    """Refuse a shard whose file has another size than its index states; None stands for no file.

    Raises:
        CacheError: it has.
    """
    if size != expected:
        found = "it is missing" if size is None else f"it has {size} bytes instead of {expected}"
        raise damaged_shard(shard, f"the shard cannot be used: {found}")


def load_shard_index(path: Path) -> ShardIndex:
    """One index; its shard is not looked at.

    Raises:
        CacheError: it is damaged.
    """
    return load(path, ShardIndex)


def damaged_shard(shard: Path, what: str) -> CacheError:
    """The error for a shard that cannot be read, with the way to make its entries anew."""
    return CacheError(
        what,
        where=str(shard),
        do=f"run `pipeline cache --repair --split NAME`: it moves the shard and its {shard.with_suffix('.json').name} "
        "aside, keeps the entries that are intact and encodes only the others anew",
    )


def index_file(folder: Path, shard: str) -> Path:
    """Where the index of a shard lies."""
    return folder / SHARDS / f"{shard.rsplit('.', 1)[0]}.json"
