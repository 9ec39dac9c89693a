"""Every flipped bit, cut and missing file is found, in every format, and an intact cache is called so."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cache import prune
from cache.errors import CacheError
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.index import update_index_file
from cache.index_file import INDEX_FILE
from cache.manifest import IndexEntry, ShardIndex, save_manifest
from cache.seal import seal, seal_holds
from cache.split_files import save_refused, save_split
from cache.split_images import RefusedImage, SplitImage, SplitImages
from cache.verify import Verification, verify_cache
from cache.writer import CacheWriter

from ..manifests import manifest_of  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import SILENT, random_features

KEYS = [f"{number:02d}" * 32 for number in range(5)]


def make_cache(folder: Path, format_name: str) -> Path:
    """Five entries in a shard of three and one of two; two splits; a note on an image that cannot be decoded."""
    # The note is escaped in JSON, where a flip in its hex digits is silent.
    fields = {"dtype": "float32", "note": "\x1f"}
    save_manifest(folder, manifest_of(format_name, fingerprint=fields, made_by={"model": "none"}))
    for numbers in ([0, 1, 2], [3, 4]):
        with CacheWriter(folder, FORMATS[format_name], shard_size=1 << 30, num_entries=len(numbers)) as writer:
            for number in numbers:
                writer.add(KEYS[number], random_features(number, tokens=number + 1))
    for split, numbers in (("train", range(5)), ("val", range(2))):
        images = [
            SplitImage(path=f"{n}.png", key=KEYS[n], image_grid_thw=(1, 2, 2 * (n + 1)), size=1, mtime_ns=1)
            for n in numbers
        ]
        save_split(folder, SplitImages(split=split, source="x", num_records=5, images=images, refused={}))
    save_refused(folder, RefusedImage(key="f" * 64, reason="is cut off"))
    update_index_file(folder)
    return folder


@pytest.fixture(params=sorted(FORMATS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A cache of each format."""
    return make_cache(tmp_path / "0123456789abcdef", request.param)


def verify(folder: Path, split: str | None = None) -> Verification:
    return verify_cache(folder, SILENT, split=split)


def test_an_intact_cache_is_sound(folder: Path) -> None:
    found = verify(folder)
    found.require_sound()
    assert len(found.shards) == 2
    assert found.intact_keys == set(KEYS)
    assert found.missing == {"train": [], "val": []}
    assert found.num_bytes == sum(
        file.stat().st_size for file in (folder / "shards").iterdir() if file.suffix != ".json"
    )


def alive(kind: type) -> int:
    return sum(type(one) is kind for one in gc.get_objects())


def test_of_intact_shards_only_the_keys_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache may have a million entries; what is read of an index is let go before the next but one is read."""
    folder = make_cache(tmp_path / "0123456789abcdef", "safetensors")
    with CacheWriter(folder, FORMATS["safetensors"], shard_size=1 << 30, num_entries=1) as writer:
        writer.add("e" * 64, random_features(9))
    gc.collect()
    before = {kind: alive(kind) for kind in (IndexEntry, ShardIndex)}
    found = verify(folder)
    assert found.intact_keys == {*KEYS, "e" * 64}
    assert alive(IndexEntry) == before[IndexEntry]
    load, kept = prune.load_shard_index, []

    def watched(path: Path) -> ShardIndex:
        kept.append(alive(ShardIndex) - before[ShardIndex])
        return load(path)

    monkeypatch.setattr(prune, "load_shard_index", watched)
    (holding,) = prune.survey_holdings(tmp_path, Fingerprint({"dtype": "float32"}), any_backend=False)
    assert holding.num_images == len(KEYS) + 1
    assert kept == [0, 1, 1], kept


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def flip_bits(folder: Path, count: int, seed: int) -> list[str]:
    """Flip single bits, one at a time, shared out evenly over all files; returns those that were not found."""
    dice, unseen = random.Random(seed), []
    files = files_of(folder)
    kinds = {INDEX_FILE, "manifest.json", "train.json", "val.json", f"{'f' * 64}.json"}
    assert kinds <= {file.name for file in files}
    assert len(files) == len(kinds) + 4, "two shards and their indexes"
    for number in range(count):
        file = files[number % len(files)]
        whole = file.read_bytes()
        bit = dice.randrange(8 * len(whole))
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        file.write_bytes(spoiled)
        with pytest.raises(CacheError) as caught:
            verify(folder).require_sound()
        if file.name not in caught.value.what:
            unseen.append(f"{file.name} bit {bit}: {caught.value}")
        file.write_bytes(whole)
    return unseen


def test_every_flipped_bit_is_found(folder: Path) -> None:
    assert flip_bits(folder, 90, seed=1) == []
    update_index_file(folder)
    verify(folder).require_sound()


@pytest.mark.soak
def test_every_one_of_many_flipped_bits_is_found(folder: Path) -> None:
    assert flip_bits(folder, 2700, seed=2) == []


def test_every_bit_of_every_json_file_counts(folder: Path) -> None:
    """The seal alone: also where a flip gives other JSON of the same meaning."""
    for file in [file for file in files_of(folder) if file.suffix == ".json"]:
        whole = file.read_bytes()
        assert seal_holds(whole) is True
        for bit in range(8 * len(whole)):
            spoiled = bytearray(whole)
            spoiled[bit // 8] ^= 1 << bit % 8
            assert seal_holds(bytes(spoiled)) is not True, f"{file.name} bit {bit}"


def test_a_seal_is_json_and_goes_behind_any_object() -> None:
    for text in ('{"a": 1}', '{\n "a": {"b": []}\n}\n'):
        assert seal_holds(text.encode()) is None
        assert seal_holds(seal(text).encode()) is True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda shard: shard.unlink(), "it is missing"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-1]), "bytes instead of"),
        (lambda shard: shard.write_bytes(b""), "it has 0 bytes instead of"),
        (lambda shard: shard.write_bytes(bytes(shard.stat().st_size)), "checksum of the whole file"),
    ],
    ids=["deleted", "cut", "empty", "zeros"],
)
def test_a_spoiled_shard_is_named_with_what_is_missing(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    shard = next(f for f in files_of(folder / "shards") if f.suffix != ".json" and KEYS[4] in index_text(f))
    spoil(shard)
    with pytest.raises(CacheError) as caught:
        verify(folder).require_sound()
    assert f"shards/{shard.name}: {message}" in caught.value.what or message in caught.value.what
    assert shard.name in caught.value.what
    assert "split train: 2 images have no intact entry" in caught.value.what
    assert "split val" not in caught.value.what
    assert "`pipeline cache --repair --split train`" in str(caught.value.do)
    verify(folder, "val").require_sound()  # the other shard has all of it


def index_text(shard: Path) -> str:
    return shard.with_suffix(".json").read_text()


def test_a_lost_index_leaves_the_split_incomplete_and_nothing_damaged(folder: Path) -> None:
    index = next(f for f in files_of(folder / "shards") if f.suffix == ".json" and KEYS[0] in f.read_text())
    index.unlink()
    with pytest.raises(CacheError, match="0 damaged files, 2 incomplete splits") as caught:
        verify(folder).require_sound()
    assert caught.value.do == "run `pipeline cache --split train`, then `pipeline cache --split val`"


def test_a_hand_edited_file_is_named(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"made_by"', ' "made_by"', 1).replace(',"digest"', ', "digest"'))
    with pytest.raises(CacheError, match=r"manifest\.json: it bears no digest"):
        verify(folder).require_sound()


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="there is no cache here"):
        verify(tmp_path / "nothing")
    with pytest.raises(CacheError, match="split 'test' has not been cached yet"):
        verify(folder, "test")
