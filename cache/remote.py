"""A cache at an address, read without a copy of it: small files once at the start, entries by range requests.

Nothing is listed there: the manifest, `entries.index` and the split lists have known names, and the index names the
shards. docs/decisions/0008-remote-caches.md says why the requests are our own.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

from cache.documents import MAX_JSON_BYTES
from cache.errors import CacheError
from cache.files import CacheFiles
from cache.find import BACKEND_FIELDS, find_cache
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.formats.extents import ShardFile
from cache.formats.relay import Arrived, Part
from cache.http_transport import HttpTransport
from cache.index import EntryIndex
from cache.index_file import INDEX_FILE
from cache.index_table import ShardStamp
from cache.manifest import MANIFEST_FILE, SHARDS, SPLITS, Manifest, folder_name, load_manifest
from cache.reader import FeatureCache
from cache.split_files import load_split
from cache.split_images import SplitImages
from cache.transport import FsspecTransport, Patience, Transport

_T = TypeVar("_T")
MAX_INDEX_BYTES = 16 << 30  # 64 bytes an entry
# A tar member's padding, its header, the header of the safetensors file in it and the grid lie together in so many
# bytes; a safetensors shard's grids as well. So a shard costs a request an entry once, and then only what is large.
BLOCK_BYTES = 8192
MAX_BLOCKS = 1024


class RemoteFile(ShardFile):
    """A shard at an address, for positional reads. Holds no connection of its own."""

    def __init__(self, transport: Transport, path: str, size: int) -> None:
        # Without the base class's: there is no file to open.
        self._transport, self._path, self.size = transport, path, size
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def close(self) -> None:
        """See ShardFile."""
        self._blocks.clear()

    def fill(self, target: memoryview, offset: int) -> None:
        """See ShardFile.

        Raises:
            ValueError: the file ends before.
            CacheError: it cannot be read.
        """
        self.require(offset, target.nbytes, "what is asked for")
        target = target.cast("B")
        if target.nbytes > BLOCK_BYTES:
            self._transport.read_into(self._path, target, offset, self.size)
        elif target.nbytes:
            start, block = self._block(offset, target.nbytes)
            target[:] = block[offset - start : offset - start + target.nbytes]

    def fill_parts(self, parts: Sequence[Part], arrived: Arrived) -> None:
        """See ShardFile. A part is one request, not many: the way there and back costs more than a checksum."""
        for target, offset in parts:
            self.fill(target, offset)
            arrived(target)

    def _block(self, offset: int, size: int) -> tuple[int, bytes]:
        """The block that holds these bytes, and where it starts; fetched if none does."""
        for start, block in list(self._blocks.items()):  # other threads add to it
            if start <= offset and offset + size <= start + len(block):
                return start, block
        content = bytearray(min(BLOCK_BYTES, self.size - offset))
        self._transport.read_into(self._path, memoryview(content), offset, self.size)
        fetched = self._blocks[offset] = bytes(content)
        if len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return offset, fetched


class RemoteFiles(CacheFiles):
    """The files of a fingerprint at an address."""

    max_open_shards = 2048  # each holds what is known of it, not a descriptor, and knowing it again costs requests

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def where(self) -> str:
        """See CacheFiles."""
        return self._transport.place("").rstrip("/")

    def manifest(self) -> Manifest:
        """See CacheFiles."""
        found = self._parsed(MANIFEST_FILE, MAX_JSON_BYTES, load_manifest)
        if found is None:
            raise CacheError(
                "there is no cache here", where=self.where, do="check cache.dir: no manifest.json is there"
            )
        return found

    def index(self) -> EntryIndex:
        """See CacheFiles."""
        found = self._parsed(INDEX_FILE, MAX_INDEX_BYTES, EntryIndex.read)
        if found is None:
            raise CacheError(
                f"there is no {INDEX_FILE}, and a cache at an address cannot be listed",
                where=self.where,
                do=self.advice("`pipeline cache --split NAME` once (it writes that file)"),
            )
        return found

    def split(self, name: str) -> SplitImages | None:
        """See CacheFiles."""
        if not name.replace("-", "").replace("_", "").isalnum():
            return None
        return self._parsed(f"{SPLITS}/{name}.json", MAX_JSON_BYTES, lambda folder: load_split(folder, name))

    def split_names(self) -> list[str]:
        """None: that would need a list of the files. Entries are found by key."""
        return []

    def document(self, place: str) -> bytes | None:
        """See CacheFiles."""
        return self._transport.read_whole(place, MAX_JSON_BYTES)

    def shard(self, stamp: ShardStamp) -> ShardFile:
        """See CacheFiles."""
        return RemoteFile(self._transport, f"{SHARDS}/{stamp.shard}", stamp.num_bytes)

    def damaged(self, shard: str, what: str) -> CacheError:
        """See CacheFiles."""
        return CacheError(
            what,
            where=self._transport.place(f"{SHARDS}/{shard}"),
            do=self.advice("`pipeline cache --repair --split NAME`"),
        )

    def advice(self, command: str) -> str:
        """See CacheFiles."""
        return f"where the cache was made, run {command}; then publish its folder anew, {INDEX_FILE} included"

    def _parsed(self, place: str, limit: int, load: Callable[[Path], _T]) -> _T | None:
        """What the reader of local files makes of a remote one: the same checks, by the same code."""
        content = self._transport.read_whole(place, limit)
        if content is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / place
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
            try:
                return load(Path(folder))
            except (CacheError, ValueError) as error:
                what = error.what if isinstance(error, CacheError) else f"is damaged: {error}"
                raise CacheError(
                    what, where=self._transport.place(place), do=self.advice("`pipeline verify` and what it advises")
                ) from error


def find_cache_at(
    place: Path | str,
    wanted: Fingerprint,
    *,
    any_backend: bool,
    verify_checksums: bool = True,
    patience: Patience | None = None,
) -> FeatureCache:
    """The cache made as `wanted` says, in a folder (see cache.find.find_cache) or at an address.

    Args:
        place: folder, or address either of the fingerprint itself or of what its folder lies in.

    Raises:
        CacheError: there is none, or it cannot be reached; says what differs.
        ConfigError: the address cannot be used.
    """
    if isinstance(place, Path):
        return find_cache(place, wanted, any_backend=any_backend, verify_checksums=verify_checksums)
    names = [folder_name(wanted.name, shard_format) for shard_format in FORMATS]
    addresses = [place, *(_below(place, name) for name in names)]
    sources = [RemoteFiles(make_transport(address, patience)) for address in addresses]
    ignore = BACKEND_FIELDS if any_backend else frozenset()
    found = []
    for files in sources:
        if files.document(MANIFEST_FILE) is None:
            continue
        differences = Fingerprint(files.manifest().fingerprint).differences(wanted, ignore=ignore)
        if differences:
            raise CacheError(
                "this cache was not made by this model and these settings; it differs in\n    "
                + "\n    ".join(differences),
                where=files.where,
                do="change the setting back, or give the address of another cache",
            )
        found.append(FeatureCache(files, verify_checksums=verify_checksums))
        if files is sources[0]:
            break  # named itself
    if not found:
        raise CacheError(
            f"there is no cache here: no manifest.json here nor in {', '.join(names)} below",
            where=sources[0].where,
            do="set cache.dir to the address of the fingerprint's own folder, the one that holds manifest.json",
        )
    return max(found, key=len)  # a copy in another format that is not finished yet holds fewer


def make_transport(url: str, patience: Patience | None = None) -> Transport:
    """The reader for an address: the standard library for http and https, fsspec for everything else.

    Raises:
        ConfigError: the address cannot be used.
    """
    chosen = HttpTransport if urlsplit(url).scheme in {"http", "https"} else FsspecTransport
    return chosen(url, patience or Patience())


def _below(url: str, name: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))
