"""What a killed writer leaves in unfinished shards is taken up: every whole entry, bit for bit, and nothing else."""

from __future__ import annotations

import base64
import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.atomic import TEMPORARY_MARK
from cache.batches import Todo
from cache.errors import ResourceError, StoppedError
from cache.features import QuantizedFeatures, StoredFeatures, VisionFeatures
from cache.formats import FORMATS
from cache.index import EntryIndex
from cache.journal import JOURNAL_SUFFIX, Journal, find_journals, shards_of
from cache.manifest import IndexEntry, load_manifest, save_manifest
from cache.quantize import quantize
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.repair import set_damaged_aside
from cache.salvage import take_up
from cache.split_images import Grid, SplitImage
from cache.writer import CacheWriter

from ..manifests import manifest_of  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import SILENT, committed_keys, fill, random_features, snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

LARGE = 1 << 30
Entries = dict[str, StoredFeatures]


def num_tokens(grid: Grid) -> int:
    return math.prod(grid) // 4


def keys(count: int) -> list[str]:
    return [f"{number:064x}" for number in range(count)]


def entries_of(make: Callable[[int], StoredFeatures], count: int = 4) -> Entries:
    return {key: make(number) for number, key in enumerate(keys(count))}


def float32(number: int) -> VisionFeatures:
    return random_features(number, tokens=5 + number)


def narrow(number: int) -> VisionFeatures:
    """Of a number of bytes that no tensor of 8-byte numbers may follow: safetensors shards hold such ones back."""
    whole = random_features(number, tokens=2 * number + 1, dtype="bfloat16")
    return VisionFeatures(whole.image_embeds[:, :3], whole.deepstack_features[..., :3], whole.image_grid_thw)


KINDS: dict[str, tuple[Callable[[int], StoredFeatures], dict[str, Any]]] = {
    "float32": (float32, {}),
    "narrow": (narrow, {"dtype": "bfloat16", "hidden_size": 3}),
    "no_levels": (lambda n: random_features(n, levels=0), {"num_deepstack_levels": 0}),
    "int8": (lambda n: quantize(float32(n), "int8"), {"storage_dtype": "int8"}),
    "float8": (lambda n: quantize(float32(n), "float8_e4m3"), {"storage_dtype": "float8_e4m3"}),
}


def todo_of(entries: Entries) -> list[Todo]:
    """The images, as a plan has them."""
    grids = {key: tuple(one.image_grid_thw.tolist()) for key, one in entries.items()}
    return [
        (SplitImage(path=f"{key}.png", key=key, image_grid_thw=grid, size=1, mtime_ns=1), ImageRef(f"{key}.png"))
        for key, grid in grids.items()
    ]


def lines_of(folder: Path) -> int:
    return sum(journal.read_bytes().count(b"\n") for journal in find_journals(folder))


def kill_a_writer(folder: Path, entries: Entries) -> None:
    """Write entries into one shard in a process that is killed once it has noted the last one."""

    def work() -> None:
        writer = CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=LARGE)
        for key, features in entries.items():
            writer.add(key, features)
        signal.pause()

    before = lines_of(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
    deadline = time.monotonic() + 60
    while lines_of(folder) < before + len(entries):
        assert child.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.kill()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def recover(folder: Path, todo: Sequence[Todo], should_stop: Callable[[], bool] = lambda: False) -> list[str]:
    """Take up what can be; returns the keys of what is left to encode."""
    manifest = load_manifest(folder)
    with CacheWriter(folder, FORMATS[manifest.format], shard_size=LARGE, num_entries=len(todo)) as writer:
        left = take_up(todo, writer, manifest, num_tokens, SILENT, should_stop)
    return [image.key for image, _ in left]


def assert_holds(folder: Path, entries: Entries) -> None:
    """The committed entries are these, in every bit."""
    cache = FeatureCache(folder, verify_checksums=True)
    assert cache.keys() == sorted(entries)
    for key, expected in entries.items():
        read = cache.read_stored(key)
        assert type(read) is type(expected)
        for name, tensor in expected.tensors().items():
            found = read.tensors()[name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            bits = [t.contiguous().flatten().view(torch.uint8) for t in (found, tensor)]
            assert torch.equal(*bits), name


@pytest.fixture(params=sorted(FORMATS))
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An empty cache of float32 features, in each format."""
    save_manifest(tmp_path / "cache", manifest_of(request.param))
    return tmp_path / "cache"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """An empty cache in the default format."""
    save_manifest(tmp_path / "cache", manifest_of("safetensors"))
    return tmp_path / "cache"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_all_that_a_killed_writer_has_written_is_taken_up(tmp_path: Path, form: str, kind: str) -> None:
    make, changes = KINDS[kind]
    manifest = manifest_of(form, **changes)
    save_manifest(tmp_path, manifest)
    entries = entries_of(make)
    kill_a_writer(tmp_path, entries)
    assert committed_keys(tmp_path) == []
    before = snapshot(tmp_path)
    left = todo_of({"f" * 64: make(9)})
    assert recover(tmp_path, [*todo_of(entries), *left]) == ["f" * 64]
    assert_holds(tmp_path, entries)
    assert before.items() <= snapshot(tmp_path).items(), "nothing of another's is changed or deleted"
    assert type(make(0)) is (VisionFeatures if manifest.storage_dtype == "same" else QuantizedFeatures)


def test_a_shard_that_had_its_name_but_no_index_yet(folder: Path) -> None:
    """A repair, which comes before, leaves it, as old as it may be: in `damaged/` nobody would take it up."""
    entries = entries_of(float32)
    writer = CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=LARGE)
    for key, features in entries.items():
        writer.add(key, features)
    stream = writer._streams[0]
    stream._writing.drain()
    shard = stream._open
    assert shard is not None
    stream._put_in_place(shard)  # and then the kill
    assert shard.path.exists()
    assert not shard.temporary.exists()
    os.utime(shard.path, (0, 0))
    assert set_damaged_aside(folder, stream._format, LARGE, SILENT).moved == []
    assert recover(folder, todo_of(entries)) == []
    assert_holds(folder, entries)


def test_the_leavings_of_two_killed_runs(folder: Path) -> None:
    """Some entries in both, one committed: each is committed once."""
    entries = entries_of(float32, 12)
    kill_a_writer(folder, dict(list(entries.items())[:7]))
    kill_a_writer(folder, dict(list(entries.items())[4:11]))
    with CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=LARGE) as writer:
        writer.add(keys(12)[11], entries[keys(12)[11]])
    missing = EntryIndex.open(folder).missing(keys(12))
    assert missing == list(range(11))
    assert recover(folder, [todo_of(entries)[n] for n in missing]) == []
    assert committed_keys(folder) == keys(12)
    assert_holds(folder, entries)


def test_only_what_is_to_do_is_taken(folder: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(folder, entries)
    some = dict(list(entries.items())[1:3])
    assert recover(folder, []) == []
    assert committed_keys(folder) == []
    assert recover(folder, todo_of(some)) == []
    assert_holds(folder, some)


def test_a_flipped_bit_costs_one_entry(folder: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(folder, entries)
    (journal,) = find_journals(folder)
    at = json.loads(journal.read_text().splitlines()[2])["offsets"]["deepstack_features"] + 11
    shard = shards_of(journal)[0]
    content = bytearray(shard.read_bytes())
    content[at] ^= 4
    shard.write_bytes(content)
    assert recover(folder, todo_of(entries)) == [keys(3)[2]]
    del entries[keys(3)[2]]
    assert_holds(folder, entries)


def test_a_shard_that_was_cut(folder: Path) -> None:
    """As a power failure may leave it, or a live writer that gives up meanwhile."""
    entries = entries_of(float32)
    kill_a_writer(folder, entries)
    (journal,) = find_journals(folder)
    offsets = json.loads(journal.read_text().splitlines()[2])["offsets"]
    os.truncate(shards_of(journal)[0], max(offsets.values()) + 1)
    assert recover(folder, todo_of(entries)) == keys(4)[2:]
    assert committed_keys(folder) == keys(2)
    shards_of(journal)[0].unlink()
    assert recover(folder, todo_of(entries)[2:]) == keys(4)[2:]


def test_a_journal_that_was_cut(one: Path, tmp_path: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(one, entries)
    content = find_journals(one)[0].read_bytes()
    first = content.index(b"\n")
    second = content.index(b"\n", first + 1)
    ends = {0: 0, 1: 0, first // 2: 0, first - 1: 0, first: 1, first + 1: 1, second - 1: 1, second: 2, second + 9: 2}
    for end, whole in ends.items():
        copy = Path(shutil.copytree(one, tmp_path / str(end)))
        os.truncate(find_journals(copy)[0], end)
        assert recover(copy, todo_of(entries)) == keys(4)[whole:], end
        assert committed_keys(copy) == keys(whole)


Line = dict[str, Any]


def changed(**fields: Any) -> Callable[[Line], Any]:
    """A line with other offsets, or other fields of its entry."""

    def change(line: Line) -> Line:
        offsets = {name: value for name, value in fields.items() if name in line["offsets"]}
        return line | {
            "offsets": line["offsets"] | offsets,
            "entry": line["entry"] | {name: value for name, value in fields.items() if name not in offsets},
        }

    return change


LIES: dict[str, Callable[[Line], Any]] = {
    "beyond the file": changed(image_embeds=1 << 40),
    "an offset that no file has": changed(image_embeds=1 << 80),
    "before the file": changed(image_embeds=-8),
    "of another entry": changed(image_embeds=4096 + 3),
    "no number": changed(image_embeds="here"),
    "nothing": changed(image_embeds=None),
    "of no image to do": changed(key="e" * 64),
    "no key": changed(key="../../etc/passwd"),
    "another grid": changed(image_grid_thw=[1, 2, 4]),
    "a huge grid": changed(image_grid_thw=[1 << 20, 1 << 20, 1 << 20]),
    "another checksum": changed(checksum="0" * 32),
    "a shape of its own": lambda line: line | {"shapes": {"image_embeds": [1 << 40, 8]}},
    "a file of its own": lambda line: line | {"shard": "/etc/passwd"},
    "a tensor too many": lambda line: line | {"offsets": line["offsets"] | {"scales": 0}},
    "a tensor twice": lambda line: line | {"late": line["late"] | {"image_embeds": ""}},
    "a tensor less": lambda line: line | {"late": {}},
    "a late tensor of another size": lambda line: line | {"late": {"image_grid_thw": "AAAA"}},
    "a late tensor of other bytes": lambda line: (
        line | {"late": {"image_grid_thw": base64.b64encode(bytes(24)).decode()}}
    ),
    "a late tensor that is no base64": lambda line: line | {"late": {"image_grid_thw": "*"}},
    "a list": lambda line: [line],
    "nested": lambda _: json.loads("[" * 500 + "]" * 500),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_journal_with_lies(one: Path, lie: str) -> None:
    """The line is passed over, the other ones count; no memory is taken for what is not there."""
    entries = entries_of(float32)
    kill_a_writer(one, entries)
    (journal,) = find_journals(one)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    lines[1] = LIES[lie](lines[1])
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert recover(one, todo_of(entries)) == [keys(2)[1]]
    del entries[keys(2)[1]]
    assert_holds(one, entries)


def test_a_grid_that_no_file_could_hold(one: Path) -> None:
    """Where even the list of images says so: refused before memory is taken, which no machine would have."""
    kill_a_writer(one, entries_of(float32, 1))
    (journal,) = find_journals(one)
    grid = (1, 1 << 20, 1 << 20)
    line = changed(image_grid_thw=grid)(json.loads(journal.read_text()))
    journal.write_text(json.dumps(line) + "\n")
    ((image, ref),) = todo_of(entries_of(float32, 1))
    assert recover(one, [(replace(image, image_grid_thw=grid), ref)]) == keys(1)


def test_what_is_no_journal_and_no_shard_is_passed_over(one: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(one, entries)
    (journal,) = find_journals(one)

    def beside(number: int) -> Path:
        return journal.with_name(f"shard-{number}.safetensors{TEMPORARY_MARK}0{JOURNAL_SUFFIX}")

    os.mkfifo(beside(1))
    beside(2).mkdir()
    beside(3).symlink_to("/dev/zero")
    beside(4).symlink_to("nowhere")
    beside(5).write_bytes(os.urandom(5000))
    beside(6).touch()
    os.truncate(beside(6), 1 << 40)  # of holes
    for number in (7, 8):  # a shard that is a pipe, or a folder; tried before the true one
        beside(number).write_bytes(journal.read_bytes())
    os.mkfifo(shards_of(beside(7))[0])
    shards_of(beside(8))[0].mkdir()
    journal.with_name(f"{TEMPORARY_MARK}0{JOURNAL_SUFFIX}").write_bytes(journal.read_bytes())
    assert recover(one, todo_of(entries)) == []
    assert_holds(one, entries)


def test_a_stop_keeps_what_was_taken_up(folder: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(folder, entries)
    asked = iter([False, True])
    with pytest.raises(StoppedError, match="is kept"):
        recover(folder, todo_of(entries), lambda: next(asked))
    assert committed_keys(folder) == keys(2)
    assert recover(folder, todo_of(entries)[2:]) == []
    assert_holds(folder, entries)


def test_beside_a_writer_that_is_alive(folder: Path) -> None:
    """Its entries are taken, its files are left alone, and both runs commit."""
    entries = entries_of(float32)
    first = dict(list(entries.items())[:3])
    with CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=LARGE) as alive:
        for key, features in first.items():
            alive.add(key, features)
        for stream in alive._streams:
            stream._writing.drain()
        before = snapshot(folder)
        assert recover(folder, todo_of(entries)) == keys(4)[3:]
        assert before.items() <= snapshot(folder).items()
        alive.add(keys(4)[3], entries[keys(4)[3]])
    assert committed_keys(folder) == sorted([*keys(3), *keys(4)])
    assert_holds(folder, entries)
    assert find_journals(folder) == [], "each writer has removed its own"


def test_two_recoveries_at_once(folder: Path) -> None:
    entries = entries_of(float32)
    kill_a_writer(folder, entries)
    manifest = load_manifest(folder)
    with (
        CacheWriter(folder, FORMATS[manifest.format], shard_size=LARGE) as one,
        CacheWriter(folder, FORMATS[manifest.format], shard_size=LARGE) as other,
    ):
        for writer in (one, other):
            assert take_up(todo_of(entries), writer, manifest, num_tokens, SILENT, lambda: False) == []
    assert committed_keys(folder) == sorted(2 * keys(4))
    assert_holds(folder, entries)


def test_a_commit_leaves_no_journal(folder: Path) -> None:
    with CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=1) as writer:
        for key, features in entries_of(float32).items():
            writer.add(key, features)
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*"))


def test_a_disk_that_is_full_for_the_journal(small_disk: Path) -> None:
    save_manifest(small_disk / "cache", manifest_of("safetensors"))
    shard = small_disk / "cache" / "shards" / f"shard-1.safetensors{TEMPORARY_MARK}0"
    journal, features = Journal(shard), float32(0)
    entry = IndexEntry(key=keys(1)[0], image_grid_thw=(1, 2, 10), checksum="0" * 32)
    journal.add(entry, features, {})
    fill(small_disk, leave=0)

    def go_on() -> None:
        for _ in range(9999):  # the last page has room for some
            journal.add(entry, features, {})

    with pytest.raises(OSError, match=r"No space.*\.journal") as caught:
        go_on()
    assert caught.value.errno == errno.ENOSPC
    journal.remove()
    assert list(shard.parent.iterdir()) == []


def test_a_shard_without_a_journal_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = CacheWriter(folder, FORMATS[load_manifest(folder).format], shard_size=LARGE)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ResourceError, match="is full"), writer:
        writer.add(keys(1)[0], float32(0))
    monkeypatch.undo()
    assert list((folder / "shards").iterdir()) == []


def test_nothing_is_read_where_nothing_is_left(one: Path) -> None:
    manifest = load_manifest(one)
    phases: list[str] = []

    class Noted:
        def start(self, what: str, total: int, unit: str) -> None:
            phases.append(f"{what}: {total} {unit}")

        def advance(self, count: int = 1) -> None:
            phases.append("one")

        def finish(self) -> None:
            phases.append("done")

    def run() -> None:
        with CacheWriter(one, FORMATS["safetensors"], shard_size=LARGE) as writer:
            take_up(todo_of(entries_of(float32, 3)), writer, manifest, num_tokens, Noted(), lambda: False)

    run()
    assert phases == []
    kill_a_writer(one, entries_of(float32, 2))
    run()
    assert phases == ["taking up images of an interrupted run: 2 image", "one", "one", "done"]
