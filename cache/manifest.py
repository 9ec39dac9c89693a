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


class _Versioned(_Document):
    model_config = ConfigDict(extra="ignore", frozen=True)

    format_version: int


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
    write_text(target, manifest.model_dump_json(indent=1))


def load_manifest(folder: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CacheError: it is missing, damaged, or of another format version.
    """
    # The version is looked at first: another version's manifest may have other fields.
    version = _load(folder / MANIFEST_FILE, _Versioned).format_version
    if version != FORMAT_VERSION:
        raise CacheError(
            f"has format version {version}; this program reads version {FORMAT_VERSION}",
            where=str(folder / MANIFEST_FILE),
            do="run `pipeline cache` again into another cache.dir, or use the program version that made it",
        )
    return _load(folder / MANIFEST_FILE, Manifest)


def save_shard_index(folder: Path, index: ShardIndex) -> None:
    """Commit a shard: from now on its entries count."""
    write_text(index_file(folder, index.shard), index.model_dump_json())


def load_shard_indexes(folder: Path) -> list[ShardIndex]:
    """The indexes of all committed shards, in the order of their names. Looks at the shards' sizes, opens none.

    Raises:
        CacheError: an index is damaged, or its shard is missing or has another size.
    """
    indexes = [_load(path, ShardIndex) for path in sorted((folder / SHARDS).glob("*.json"))]
    for index in indexes:
        shard = folder / SHARDS / index.shard
        size = shard.stat().st_size if shard.is_file() else None
        if size != index.num_bytes:
            found = "it is missing" if size is None else f"it has {size} bytes instead of {index.num_bytes}"
            raise damaged_shard(shard, f"the shard cannot be used: {found}")
    return indexes


def damaged_shard(shard: Path, what: str) -> CacheError:
    """The error for a shard that cannot be read, with the way to make its entries anew."""
    return CacheError(
        what,
        where=str(shard),
        do=f"remove {shard} and {shard.with_suffix('.json').name} beside it, then run `pipeline cache` again: "
        "only the images of this shard are encoded anew",
    )


def index_file(folder: Path, shard: str) -> Path:
    """Where the index of a shard lies."""
    return folder / SHARDS / f"{shard.rsplit('.', 1)[0]}.json"


def split_file(folder: Path, split: str) -> Path:
    """Where the image list of a split lies."""
    return folder / SPLITS / f"{split}.json"


def save_split(folder: Path, images: SplitImages) -> None:
    """Write the image list of a split, unless it is there already."""
    if load_split(folder, images.split) == images:
        return
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
            raise _damaged(path, f"it has {size} bytes, more than any file of this kind")
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise CacheError("is missing", where=str(path), do="run `pipeline cache` for this configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{field}: {first['msg']}" if field else first["msg"]) from error
    except OSError as error:
        raise CacheError(
            f"cannot be read: {error.strerror or error}", where=str(path), do="check its permissions"
        ) from error


def _damaged(path: Path, what: str) -> CacheError:
    return CacheError(f"is damaged: {what}", where=str(path), do="remove this file and run `pipeline cache` again")
