"""What a cache folder says about itself: the manifest, an index a shard, an image list a split. All JSON, all checked.

Layout of `<cache.dir>/<fingerprint>/` (docs/cache-format.md is the specification):
    manifest.json           what made the features, and their shape
    shards/NAME.SUFFIX      features
    shards/NAME.json        index of that shard; written after it, so a shard without an index does not count
    splits/SPLIT.json       the images of a split: path -> key
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from cache.atomic import write_text
from cache.errors import CacheError
from cache.fingerprint import FORMAT_VERSION, Fingerprint

MANIFEST_FILE = "manifest.json"
SHARDS, SPLITS = "shards", "splits"

Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Grid = tuple[int, int, int]
MAX_JSON_BYTES = 1 << 30


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Manifest(_Document):
    """What made the features, and their shape."""

    format_version: int
    format: str
    dtype: Literal["bfloat16", "float16", "float32"]
    hidden_size: int = Field(gt=0)
    num_deepstack_levels: int = Field(ge=0)
    fingerprint: dict[str, Any]
    made_by: dict[str, str]

    def bytes_per_token(self) -> int:
        """Bytes that one merged image token takes, all levels together."""
        width = 4 if self.dtype == "float32" else 2
        return width * self.hidden_size * (1 + self.num_deepstack_levels)


class IndexEntry(_Document):
    """One image of a shard."""

    key: Key
    image_grid_thw: Grid
    checksum: str


class ShardIndex(_Document):
    """The entries of one shard."""

    shard: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    num_bytes: int = Field(ge=0)
    entries: list[IndexEntry]


class SplitImage(_Document):
    """One image of a split. Size and modification time tell whether the file is still the one that was hashed."""

    path: str
    key: Key
    image_grid_thw: Grid
    size: int
    mtime_ns: int


class SplitImages(_Document):
    """The images that a split's records name, and those that were refused."""

    split: str
    source: str
    num_records: int
    images: list[SplitImage]
    refused: dict[str, str]


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest where there is none; where there is one it must be for the same fingerprint."""
    target = folder / MANIFEST_FILE
    if target.exists():
        there = load_manifest(folder)
        if there.fingerprint != manifest.fingerprint or there.format != manifest.format:
            raise CacheError(
                "holds features made otherwise: "
                + "; ".join(Fingerprint(there.fingerprint).differences(Fingerprint(manifest.fingerprint))),
                where=str(target),
                do="give another cache.dir",
            )
        return
    for part in (SHARDS, SPLITS):
        (folder / part).mkdir(parents=True, exist_ok=True)
    write_text(target, manifest.model_dump_json(indent=1))


def load_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CacheError: it is missing, damaged, or of another format version.
    """
    manifest = _load(folder / MANIFEST_FILE, Manifest)
    if manifest.format_version != FORMAT_VERSION:
        raise CacheError(
            f"has format version {manifest.format_version}; this program reads version {FORMAT_VERSION}",
            where=str(folder / MANIFEST_FILE),
            do="run `pipeline cache` again into another cache.dir, or use the program version that made it",
        )
    return manifest


def save_shard_index(folder: Path, index: ShardIndex) -> None:
    """Commit a shard: from now on its entries count."""
    stem = index.shard.rsplit(".", 1)[0]
    write_text(folder / SHARDS / f"{stem}.json", index.model_dump_json())


def load_shard_indexes(folder: Path) -> list[ShardIndex]:
    """The indexes of all committed shards, in the order of their names."""
    return [_load(path, ShardIndex) for path in sorted((folder / SHARDS).glob("*.json"))]


def split_file(folder: Path, split: str) -> Path:
    """Where the image list of a split lies."""
    return folder / SPLITS / f"{split}.json"


def save_split(folder: Path, images: SplitImages) -> None:
    """Write the image list of a split."""
    write_text(split_file(folder, images.split), images.model_dump_json())


def load_split(folder: Path, split: str) -> SplitImages | None:
    """The image list of a split; None if the split has not been cached yet."""
    path = split_file(folder, split)
    return _load(path, SplitImages) if path.exists() else None


_D = TypeVar("_D", bound=_Document)


def _load(path: Path, kind: type[_D]) -> _D:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CacheError(f"is {size} bytes, more than any file of this kind", where=str(path))
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CacheError("is missing", where=str(path), do="run `pipeline cache` for this configuration") from None
    except (OSError, ValidationError) as error:
        first = str(error).split("\n", 1)[0]
        raise CacheError(
            f"is damaged: {first}", where=str(path), do="remove this file and run `pipeline cache` again"
        ) from error
