"""Writes a cache anew in another shard format, shard size or storage dtype. Needs neither images nor the tower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cache.atomic import disk_full
from cache.config import StorageDtype
from cache.errors import ConfigError, StoppedError
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.index import EntryIndex
from cache.manifest import Manifest, folder_name, save_manifest
from cache.plan import free_bytes
from cache.progress import Progress
from cache.quantize import to_storage
from cache.reader import FeatureCache
from cache.split_files import save_split
from cache.writer import CacheWriter

DEFAULT_SHARD_SIZE = 1 << 30


def repack(
    source: FeatureCache,
    target_root: Path,
    *,
    format: str | None,
    shard_size: int | None,
    dtype: StorageDtype | None,
    progress: Progress,
    should_stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Copy every entry and every split into a cache of its own below `target_root`; the source stays as it is.

    Every entry is compared with its checksum. Run again, it goes on where it was; the splits are written last, so that
    a copy that is not complete is not taken for one.

    Args:
        format: of the shards; the source's when None.
        shard_size: in bytes; 1 GiB when None.
        dtype: how the numbers are stored, see CacheConfig.storage_dtype; as in the source when None. Only exact
            features can be quantised: nothing is ever widened, as if what was lost could come back.

    Returns:
        The folder of the copy.

    Raises:
        CacheError: an entry of the source is damaged, or the folder holds something else.
        ConfigError: the format is unknown, the dtype is not narrower, or the copy would be the source itself.
        ResourceError: the disk is full; what was committed is intact.
        StoppedError: `should_stop` said so; what was committed is intact.
    """
    manifest = _manifest(source.manifest, format or source.manifest.format, dtype)
    folder = target_root / folder_name(Fingerprint(manifest.fingerprint).name, manifest.format)
    if folder.resolve() == source.folder.resolve():
        raise ConfigError(
            "the copy would be the source itself", where=str(folder), do="change the format or dtype, or give --output"
        )
    todo = _missing(source, folder)
    ratio = manifest.bytes_per_token() / source.manifest.bytes_per_token()
    share = sum(map(len, todo)) / max(len(source), 1)
    needed, free = int(source.num_bytes * ratio * share), free_bytes(folder)
    if needed > free:
        raise disk_full(folder, f"{needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
    save_manifest(folder, manifest)
    _copy(source, folder, todo, manifest, shard_size or DEFAULT_SHARD_SIZE, progress, should_stop)
    for name in source.files.split_names():
        listed = source.files.split(name)
        if listed is not None:
            save_split(folder, listed)
    return folder


def _manifest(source: Manifest, shard_format: str, dtype: StorageDtype | None) -> Manifest:
    """What the copy says about itself: all that the source says, but for format and storage dtype."""
    if shard_format not in FORMATS:
        raise ConfigError(f"shard format {shard_format!r} is not known", do=f"choose one of: {', '.join(FORMATS)}")
    wanted = dtype or source.storage_dtype
    if source.storage_dtype not in ("same", wanted):
        raise ConfigError(
            f"features stored as {source.storage_dtype} cannot be stored as {wanted}: what was lost does not come back",
            do="repack the exact cache, or cache again",
        )
    fields = source.fingerprint
    if wanted != source.storage_dtype:
        fields = Fingerprint(fields).with_storage(wanted).fields
    return source.model_copy(update={"format": shard_format, "storage_dtype": wanted, "fingerprint": fields})


def _missing(source: FeatureCache, folder: Path) -> list[list[str]]:
    """The keys to copy, in groups that lie in one shard."""
    there = EntryIndex.open(folder)
    return [[key for key in keys if key not in there] for _, keys in source.by_shard()]


def _copy(
    source: FeatureCache,
    folder: Path,
    todo: list[list[str]],
    manifest: Manifest,
    shard_size: int,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    checked = FeatureCache(source.files, verify_checksums=True)
    count = sum(map(len, todo))
    progress.start("repacking", count, "image")
    with CacheWriter(folder, FORMATS[manifest.format], shard_size=shard_size, num_entries=count) as writer:
        for key in (key for keys in todo for key in keys):
            if should_stop():
                raise StoppedError("stopped; everything copied so far is kept", do="run the same command to go on")
            stored = checked.read_stored(key)
            if manifest.storage_dtype != source.manifest.storage_dtype:
                stored = to_storage(stored, manifest.storage_dtype, manifest.dtype, where=f"entry {key[:12]}...")
            writer.add(key, stored)
            progress.advance()
    progress.finish()
