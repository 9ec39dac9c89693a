"""A cache at an address: right whatever the server does, or an error that names the address."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import DataLoader, Dataset

from cache.config import CacheConfig
from cache.errors import CacheError, ConfigError
from cache.files import LocalFiles
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.formats.extents import ShardFile
from cache.manifest import load_manifest, save_manifest
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.remote import RemoteFiles, find_cache_at, make_transport
from cache.split_files import save_split
from cache.split_images import SplitImage, SplitImages
from cache.staging import stage
from cache.transport import Patience
from cache.writer import CacheWriter

from ..manifests import manifest_of  # noqa: TID252  (tests are no package that could be imported by name)
from ..range_server import Site  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import assert_same, random_features

KEYS = [f"{number:064x}" for number in range(6)]
FEATURES = [random_features(number, tokens=300 + number) for number in range(len(KEYS))]  # more than a block each
FINGERPRINT = Fingerprint({"dtype": "float32"})
FAST = Patience(attempts=4, first_delay=0.001, longest_delay=0.002, timeout=5.0)


def make_cache(root: Path, name: str = "webdataset", *, damaged_checksum: bool = False) -> Path:
    """Six images in two shards, the split `train` over all of them and `val` over two."""
    folder = root / FINGERPRINT.name
    save_manifest(folder, manifest_of(name, fingerprint=FINGERPRINT.fields))
    with CacheWriter(folder, FORMATS[name], shard_size=3 * FEATURES[0].num_bytes) as writer:
        for key, features in zip(KEYS, FEATURES, strict=True):
            writer.add(key, features)
    for split, count in (("train", len(KEYS)), ("val", 2)):
        images = [
            SplitImage(path=f"{n}.png", key=KEYS[n], image_grid_thw=(1, 2, 2 * (300 + n)), size=1, mtime_ns=1)
            for n in range(count)
        ]
        save_split(
            folder, SplitImages(split=split, source="-", num_records=count, images=images, refused={}, num_parts=1)
        )
    return folder


def open_at(url: str, **options: Any) -> FeatureCache:
    return find_cache_at(url, FINGERPRINT, any_backend=True, patience=FAST, **options)


@pytest.mark.parametrize("name", list(FORMATS))
def test_entries_are_those_on_disk(name: str, tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path, name)
    site = serve(tmp_path)
    cache = open_at(site.url)
    assert cache.keys() == KEYS
    assert [image.key for image in cache.split("train").images] == KEYS
    start = [path.rpartition("/")[2] for path, _ in site.log]
    assert not site.shard_requests(), "opening reads no shard"
    assert start.count("entries.index") == 1
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(cache.read(key), features)
    once = len(site.shard_requests())
    for key in KEYS:
        cache.read(key)
    again = len(site.shard_requests()) - once
    assert again == 2 * len(KEYS), "an open shard costs a request a feature tensor, nothing else"


@pytest.mark.parametrize(("name", "requests"), [("safetensors", 5), ("webdataset", 26 + 4), ("hdf5", 20)])
def test_what_the_first_entry_of_a_shard_costs(
    name: str, requests: int, tmp_path: Path, serve: Callable[[Path], Site]
) -> None:
    """Each waits for the one before it: where the server is far away, this is what a worker waits for."""
    folder = tmp_path / FINGERPRINT.name
    save_manifest(folder, manifest_of(name, fingerprint=FINGERPRINT.fields))
    with CacheWriter(folder, FORMATS[name], shard_size=1 << 30, num_entries=26) as writer:
        for number in range(26):
            writer.add(f"{number:064x}", random_features(number, tokens=300))
    site = serve(tmp_path)
    cache = open_at(site.url)
    site.log.clear()
    assert_same(cache.read(f"{25:064x}"), random_features(25, tokens=300))
    assert len(site.log) <= requests


def test_the_address_may_be_the_fingerprints_own_and_have_a_query(
    tmp_path: Path, serve: Callable[[Path], Site]
) -> None:
    folder = make_cache(tmp_path)
    site = serve(tmp_path)
    cache = open_at(f"{site.url}/{folder.name}/?signature=secret")
    assert_same(cache.read(KEYS[2]), FEATURES[2])
    assert all(path.endswith("?signature=secret") for path, _ in site.log)
    assert "secret" not in cache.files.where


def test_any_fsspec_address(tmp_path: Path) -> None:
    make_cache(tmp_path)
    cache = open_at(f"file://{tmp_path}")
    assert_same(cache.read(KEYS[1]), FEATURES[1])
    assert_same(pickle.loads(pickle.dumps(cache)).read(KEYS[5]), FEATURES[5])
    with pytest.raises(ConfigError, match=r"(?s)cache\.dir cannot be read.*nosuch.*What to do"):
        open_at("nosuch://bucket/features")


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """A cache in fsspec's object store in memory, which has no folders and is nobody's local files."""
    make_cache(tmp_path, "safetensors")
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/bucket", recursive=True)
    shutil.rmtree(tmp_path)
    yield "memory://bucket"
    store.rm("/bucket", recursive=True)


def test_an_object_store(bucket: str) -> None:
    cache = open_at(bucket)
    assert [image.key for image in cache.split("train").images] == KEYS
    assert open_at(f"{bucket}/{FINGERPRINT.name}").keys() == KEYS
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(cache.read(key), features)
    loader = DataLoader(_Entries(cache), batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert all(torch.equal(tensor, FEATURES[index].image_embeds) for index, tensor in loader)
    store, shard = fsspec.filesystem("memory"), cache.shard_of(KEYS[0]).shard
    place = f"/bucket/{FINGERPRINT.name}/shards/{shard}"
    whole = store.cat_file(place)
    at = whole.index(FEATURES[0].image_embeds.numpy().tobytes())
    store.pipe_file(place, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(CacheError, match=rf"(?s)memory://bucket/.*{shard}: .*checksum.*--repair"):
        cache.read(KEYS[0])
    store.rm(place)
    with pytest.raises(CacheError, match="is not there"):
        open_at(bucket).read(KEYS[0])
    with pytest.raises(CacheError, match=r"no manifest\.json here"):
        open_at("memory://nothing")


@pytest.mark.parametrize("fault", ["drop", "500", "truncate"])
def test_passing_failures_are_tried_again(fault: str, tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site = serve(tmp_path)
    cache = open_at(site.url)
    for key, features in zip(KEYS, FEATURES, strict=True):
        site.faults += [fault, fault, fault]  # one fewer than the attempts
        assert_same(cache.read(key), features)
        assert not site.faults, "the faults did happen"
    site.only_shards, site.faults = False, [fault]
    assert len(open_at(site.url)) == len(KEYS), "the small files as well"


def test_a_kept_connection_that_the_server_has_closed_is_no_failure(
    tmp_path: Path, serve: Callable[[Path], Site]
) -> None:
    """As servers close those that nobody has used for a while."""
    make_cache(tmp_path)
    site = serve(tmp_path)
    site.hangs_up = True
    cache = find_cache_at(site.url, FINGERPRINT, any_backend=True, patience=Patience(attempts=1))
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(cache.read(key), features)
    site.faults = ["drop"]
    with pytest.raises(CacheError, match="after 1 attempts"):
        cache.read(KEYS[0])
    assert not site.faults, "a new connection that is dropped is one"


def test_what_arrived_is_not_fetched_again(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site = serve(tmp_path)
    cache = open_at(site.url)
    cache.read(KEYS[0])
    site.log.clear()
    site.faults = ["truncate"]
    assert_same(cache.read(KEYS[0]), FEATURES[0])
    asked = [int(last) - int(first) for _, r in site.log if r for first, last in [r[6:].split("-")]]
    first, second = asked[:2]
    assert second < first * 0.6


def test_failures_that_last_end_in_an_error(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site = serve(tmp_path)
    cache = open_at(site.url)
    site.faults = ["500"] * 100
    with pytest.raises(CacheError, match=rf"(?s){site.url}/.*\.tar: cannot be read after 4 attempts.*500.*What to do"):
        cache.read(KEYS[0])


def test_a_server_that_is_down_is_named() -> None:
    url = "http://127.0.0.1:9"  # nobody listens on the discard port
    with pytest.raises(CacheError, match=rf"(?s){url}/manifest\.json: .*refused.*server is up.*same command again"):
        open_at(url)


def test_a_server_without_ranges_is_refused_at_once(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site = serve(tmp_path)
    site.ranges = False
    cache = open_at(site.url)
    with pytest.raises(CacheError, match=r"(?s)does not answer range requests.*What to do: serve the cache with"):
        cache.read(KEYS[0])
    assert len(site.shard_requests()) == 1


def test_redirects_are_not_followed(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site, other = serve(tmp_path), serve(tmp_path)
    site.redirect = f"{other.url}/manifest.json"
    with pytest.raises(CacheError, match="redirects"):
        open_at(site.url)
    assert not other.log


@pytest.mark.parametrize("name", list(FORMATS))
def test_corrupt_bytes_are_found(name: str, tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path, name)
    cache = open_at(serve(tmp_path).url)
    shard = folder / "shards" / cache.shard_of(KEYS[1]).shard
    content = bytearray(shard.read_bytes())
    place = content.find(FEATURES[1].image_embeds.numpy().tobytes())
    content[place + 100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CacheError, match=rf"(?s)http://.*{shard.name}: .*checksum.*where the cache was made.*--repair"):
        cache.read(KEYS[1])
    assert_same(cache.read(KEYS[0]), FEATURES[0])


def test_a_shard_of_another_size_is_refused(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path)
    cache = open_at(serve(tmp_path).url)
    shard = folder / "shards" / cache.shard_of(KEYS[0]).shard
    shard.write_bytes(shard.read_bytes() + bytes(10240))
    with pytest.raises(CacheError, match="does not have the"):
        cache.read(KEYS[0])
    shard.unlink()
    with pytest.raises(CacheError, match="is not there"):
        cache.read(KEYS[0])


@pytest.mark.parametrize("place", ["manifest.json", "entries.index", "splits/train.json"])
def test_damaged_small_files_are_named(place: str, tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path)
    site = serve(tmp_path)
    file = folder / place
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"\0" * 100, b""):
        file.write_bytes(content)
        with pytest.raises(CacheError, match=rf"{site.url}/{folder.name}/{place}: "):
            open_at(site.url).split("train")


def test_missing_small_files_are_named(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path)
    site = serve(tmp_path)
    with pytest.raises(CacheError, match=r"(?s)split 'test' has not been cached.*publish its folder anew"):
        open_at(site.url).split("test")
    (folder / "entries.index").unlink()
    with pytest.raises(CacheError, match=r"(?s)there is no entries\.index.*pipeline cache"):
        open_at(site.url)
    (folder / "manifest.json").unlink()
    with pytest.raises(CacheError, match=rf"(?s){site.url}: .*no manifest\.json here nor in {folder.name}, "):
        open_at(site.url)


def test_sizes_are_limited_before_memory_is_taken(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    transport = make_transport(serve(tmp_path).url, FAST)
    with pytest.raises(CacheError, match="more than any file of this kind"):
        transport.read_whole(f"{FINGERPRINT.name}/manifest.json", limit=10)


def test_no_path_leads_outside(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    site = serve(tmp_path)
    cache = open_at(site.url)
    site.log.clear()
    for name in ("../manifest", "../../etc/passwd", "a/b", "", ".."):
        with pytest.raises(CacheError, match="has not been cached"):
            cache.split(name)
    assert not site.log


def faulty(monkeypatch: pytest.MonkeyPatch, name: str, errors: list[Exception]) -> None:
    """The store's next calls of `name` raise these."""
    call = getattr(MemoryFileSystem, name)

    def raising(self: MemoryFileSystem, *args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(self, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, name, raising)


class StoreError(Exception):
    """As object stores' libraries have: no OSError."""


def test_failures_of_an_object_stores_library_are_met_with_patience(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, "info", [StoreError("cannot connect")] * (FAST.attempts - 1))
    cache = open_at(bucket)
    errors: list[Exception] = [StoreError("cannot connect")] * (FAST.attempts - 1)
    faulty(monkeypatch, "cat_file", errors)
    assert_same(cache.read(KEYS[0]), FEATURES[0])
    assert not errors
    errors += [StoreError("no credentials")] * FAST.attempts
    with pytest.raises(CacheError, match=r"(?s)after 4 attempts: StoreError: no credentials.*the credentials"):
        cache.read(KEYS[4])


def test_what_an_object_store_refuses_is_not_asked_for_again(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [PermissionError("Forbidden")] * 2
    faulty(monkeypatch, "info", errors)
    with pytest.raises(CacheError, match=r"(?s)memory://bucket/manifest\.json.*refuses it: Forbidden.*credentials"):
        open_at(bucket)
    assert len(errors) == 1


def test_another_fingerprint_is_refused(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path)
    url = f"{serve(tmp_path).url}/{folder.name}"
    with pytest.raises(CacheError, match=r"(?s)dtype: 'float32' in the cache, 'bfloat16' asked for"):
        find_cache_at(url, Fingerprint({"dtype": "bfloat16"}), any_backend=False, patience=FAST)


def test_the_index_is_brought_up_to_date_without_anything_to_write(tmp_path: Path) -> None:
    folder = make_cache(tmp_path)
    index = folder / "entries.index"
    index.unlink()
    with CacheWriter(folder, FORMATS["webdataset"], shard_size=1):
        pass
    assert index.is_file()
    before = index.stat().st_ino
    with CacheWriter(folder, FORMATS["webdataset"], shard_size=1):
        pass
    assert index.stat().st_ino == before, "and left alone when it is"


class _Entries(Dataset[tuple[int, torch.Tensor]]):
    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache

    def __len__(self) -> int:
        return len(KEYS)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self._cache.read(KEYS[index]).image_embeds


@pytest.mark.parametrize("remote", [False, True])
def test_threads_share_a_cache_that_keeps_few_shards_open(
    remote: bool, tmp_path: Path, serve: Callable[[Path], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_cache(tmp_path)
    monkeypatch.setattr(RemoteFiles if remote else LocalFiles, "max_open_shards", 1)
    cache = open_at(serve(tmp_path).url) if remote else FeatureCache(folder)

    def read(number: int) -> None:
        for n in range(number, number + 4 * len(KEYS)):
            assert_same(cache.read(KEYS[n % len(KEYS)]), FEATURES[n % len(KEYS)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))


def test_a_shard_that_is_let_go_while_it_is_read_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FeatureCache(make_cache(tmp_path))
    monkeypatch.setattr(LocalFiles, "max_open_shards", 1)
    assert cache.shard_of(KEYS[0]) != cache.shard_of(KEYS[5])
    cache.read(KEYS[0])
    fill, others = ShardFile.fill, [KEYS[5]]

    def another_thread_reads(file: ShardFile, target: memoryview, offset: int) -> None:
        if others:
            assert_same(cache.read(others.pop()), FEATURES[5])
        fill(file, target, offset)

    monkeypatch.setattr(ShardFile, "fill", another_thread_reads)
    assert_same(cache.read(KEYS[0]), FEATURES[0])
    assert not others


def test_forked_workers_open_connections_of_their_own(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    make_cache(tmp_path)
    cache = open_at(serve(tmp_path).url)
    cache.read(KEYS[0])  # the parent's connection is open when the workers are forked
    loader = DataLoader(_Entries(cache), batch_size=None, num_workers=2, multiprocessing_context="fork")
    seen = list(loader)
    assert [index for index, _ in seen] == list(range(len(KEYS)))
    assert all(torch.equal(tensor, FEATURES[index].image_embeds) for index, tensor in seen)
    assert_same(cache.read(KEYS[3]), FEATURES[3])
    assert_same(pickle.loads(pickle.dumps(cache)).read(KEYS[4]), FEATURES[4])  # as to a spawned worker


@pytest.mark.parametrize("url", ["http:///features", "http://me:secret@host/features", "https://host/a#b"])
def test_addresses_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match="no address that can be used") as caught:
        make_transport(url)
    assert "secret" not in str(caught.value)


def test_an_address_stays_what_it_is_in_the_configuration() -> None:
    assert CacheConfig(dir="http://host//path").dir == "http://host//path"  # type: ignore[arg-type]
    assert CacheConfig(dir="some/folder").dir == Path("some/folder")  # type: ignore[arg-type]


def test_waiting_grows_and_is_bounded() -> None:
    patience = Patience(first_delay=1.0, longest_delay=10.0)
    for failures, longest in ((1, 1.0), (3, 4.0), (7, 10.0)):
        delays = {patience.delay(failures) for _ in range(50)}
        assert longest / 2 <= min(delays) < max(delays) <= longest


def test_staging_from_an_address(tmp_path: Path, serve: Callable[[Path], Site]) -> None:
    folder = make_cache(tmp_path / "source")
    site = serve(tmp_path / "source")
    cache = open_at(site.url)
    site.faults = ["truncate", "500"]
    copy = stage(cache, tmp_path / "disk", ["train"], Silent())
    shutil.rmtree(folder)
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(copy.read(key), features)
    assert load_manifest(copy.folder) == cache.manifest
    assert isinstance(cache.files, RemoteFiles)
