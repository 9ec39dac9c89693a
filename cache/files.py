"""Where the files of a fingerprint lie: in a folder here, or elsewhere (cache.remote)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from cache.errors import CacheError
from cache.formats.extents import ShardFile
from cache.index import EntryIndex
from cache.index_table import ShardStamp
from cache.manifest import MANIFEST_FILE, SHARDS, SPLITS, Manifest, damaged_shard, load_manifest
from cache.split_files import load_split
from cache.split_images import SplitImages


class CacheFiles(ABC):
    """Reads what a cache consists of. Safe to hand to worker processes: nothing is open in it."""

    max_open_shards: int

    @property
    @abstractmethod
    def where(self) -> str:
        """The folder or the address, for messages."""

    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            CacheError: it is missing or damaged, or cannot be reached.
        """

    @abstractmethod
    def index(self) -> EntryIndex:
        """All entries.

        Raises:
            CacheError: an index is damaged or cannot be reached, or a shard is missing.
        """

    @abstractmethod
    def split(self, name: str) -> SplitImages | None:
        """The image list of a split; None if the split has not been cached yet.

        Raises:
            CacheError: it is damaged or cannot be reached.
        """

    @abstractmethod
    def split_names(self) -> list[str]:
        """The splits that are known without being named, sorted."""

    @abstractmethod
    def document(self, place: str) -> bytes | None:
        """The bytes of a small file, by its path below the fingerprint's folder; None if it is not there.

        Raises:
            CacheError: it cannot be read or reached, or it is larger than any file of its kind.
        """

    @abstractmethod
    def shard(self, stamp: ShardStamp) -> ShardFile:
        """A shard, for positional reads.

        Raises:
            ValueError, OSError: it cannot be opened.
        """

    @abstractmethod
    def damaged(self, shard: str, what: str) -> CacheError:
        """The error for a shard that cannot be used."""

    def advice(self, command: str) -> str:
        """What to do when a command has to be run for this cache."""
        return f"run {command}"


class LocalFiles(CacheFiles):
    """A folder of this machine, or of a file system that it has mounted."""

    max_open_shards = 64  # each holds a file descriptor

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def where(self) -> str:
        """See CacheFiles."""
        return str(self.folder)

    def manifest(self) -> Manifest:
        """See CacheFiles."""
        return load_manifest(self.folder)

    def index(self) -> EntryIndex:
        """See CacheFiles."""
        return EntryIndex.open(self.folder)

    def split(self, name: str) -> SplitImages | None:
        """See CacheFiles."""
        return load_split(self.folder, name)

    def split_names(self) -> list[str]:
        """See CacheFiles."""
        return sorted(file.stem for file in (self.folder / SPLITS).glob("*.json"))

    def document(self, place: str) -> bytes | None:
        """See CacheFiles."""
        file = self.folder / place
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(
                f"cannot be read: {error.strerror or error}", where=str(file), do="check its permissions"
            ) from error

    def shard(self, stamp: ShardStamp) -> ShardFile:
        """See CacheFiles."""
        return ShardFile(self.folder / SHARDS / stamp.shard)

    def damaged(self, shard: str, what: str) -> CacheError:
        """See CacheFiles."""
        return damaged_shard(self.folder / SHARDS / shard, what)


def fingerprint_folders(root: Path) -> list[Path]:
    """The folders below `root` that hold a manifest."""
    return sorted(path.parent for path in root.glob(f"*/{MANIFEST_FILE}"))


def no_cache(root: Path) -> CacheError:
    """The error for a folder that holds none."""
    return CacheError("there is no cache here", where=str(root), do="run `pipeline cache --split NAME` first")
