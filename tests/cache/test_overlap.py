"""The tower, the copy back and the writing overlap, and what is between them is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cache import shard_stream, writer
from cache.build import CacheBuilder
from cache.copy_back import BATCHES_AHEAD, CopyBack
from cache.features import StoredFeatures, VisionFeatures
from cache.formats import FORMATS, SafetensorsFormat
from cache.formats.base import checksum
from cache.journal import find_journals
from cache.manifest import load_shard_indexes
from cache.progress import Silent
from cache.shard_stream import ShardStream
from cache.split_images import SplitImage
from cache.vision_tower import VisionTower
from cache.writer import CacheWriter
from pipeline.config import PipelineConfig

from .conftest import assert_same, builder_of, committed_keys, draw_images, random_features, write_rows

MakeConfig = Callable[..., PipelineConfig]


class Gate:
    """Keeps the writing thread from writing entries but the first `free` ones, and counts what it has written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.free = 0
        self.written = 0
        create = SafetensorsFormat.create

        def gated(form: SafetensorsFormat, path: Path, num_entries: int) -> Any:
            shard = create(form, path, num_entries)
            append = shard.append

            def wait(key: str, features: StoredFeatures) -> dict[str, int]:
                assert self.written < self.free or self.open.wait(60)
                offsets = append(key, features)
                self.written += 1
                return offsets

            shard.append = wait  # type: ignore[method-assign]
            return shard

        monkeypatch.setattr(SafetensorsFormat, "create", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class InFlight:
    """What is encoded and not in a file yet, looked at after each batch.

    Attributes:
        sizes: bytes of each image's features.
        images, num_bytes: in flight, after each batch.
    """

    def __init__(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = gate
        self.sizes: list[int] = []
        self.images: list[int] = []
        self.num_bytes: list[int] = []
        encode = VisionTower.encode

        def counted(tower: VisionTower, pixels: Any, grids: Any) -> list[VisionFeatures]:
            found = encode(tower, pixels, grids)
            self.sizes.extend(one.num_bytes for one in found)
            self.images.append(len(self.sizes) - gate.written)
            self.num_bytes.append(sum(self.sizes[gate.written :]))
            return found

        monkeypatch.setattr(VisionTower, "encode", counted)

    def open_late(self) -> None:
        """Open the gate once the tower has come to a halt."""
        deadline, before = time.monotonic() + 60, -1
        while before != len(self.sizes) or not self.sizes:
            before = len(self.sizes)
            time.sleep(1)
            assert time.monotonic() < deadline
        self.gate.open.set()

    def watch(self, builder: CacheBuilder) -> None:
        """Cache while nothing can be written at first."""
        opener = threading.Thread(target=self.open_late)
        opener.start()
        builder.run("train", Silent())
        opener.join()


@pytest.fixture
def in_flight(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> InFlight:
    return InFlight(gate, monkeypatch)


def test_the_tower_goes_on_while_nothing_can_be_written_but_not_for_ever(
    in_flight: InFlight, tmp_path: Path, make_config: MakeConfig
) -> None:
    """Bytes in flight are those of encoded images that are not in a file yet: bounded whatever the dataset."""
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 60))
    shard_size = 300_000
    builder = builder_of(make_config({"train": str(rows)}, cache={"shard_size": shard_size}))
    in_flight.watch(builder)
    assert len(committed_keys(builder.folder)) == 60
    largest = max(in_flight.sizes)
    assert max(in_flight.images) > BATCHES_AHEAD + 1, "nothing overlaps"
    assert max(in_flight.num_bytes) <= shard_size // 4 + (BATCHES_AHEAD + 2) * largest
    assert max(in_flight.num_bytes) < sum(in_flight.sizes) / 2, "the test shows nothing if all fits"


def test_what_is_in_flight_is_less_than_a_shard_when_large_batches_go_through_the_tower(
    in_flight: InFlight, tmp_path: Path, make_config: MakeConfig
) -> None:
    """As with images of 40 MiB, eight at once, and shards of 1 GiB: 26 of them."""
    images = draw_images(tmp_path / "images", 72)
    for number, file in enumerate(images):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(file)
    rows = write_rows(tmp_path / "train.jsonl", images)
    patches = 4 * 4
    of_image = builder_of(make_config({"train": str(rows)})).manifest.bytes_per_token() * patches // 4
    cache = {"patches_per_batch": 8 * patches, "shard_size": 26 * of_image}
    builder = builder_of(make_config({"train": str(rows)}, cache=cache))
    in_flight.gate.free = 2  # the first batch leaves the device, and as much as may wait for the disk does
    in_flight.watch(builder)
    assert set(in_flight.sizes) == {of_image}
    assert len(in_flight.num_bytes) == 9
    assert max(in_flight.num_bytes) <= cache["shard_size"]
    assert len(committed_keys(builder.folder)) == 72


def test_the_copy_of_an_image_is_begun_before_the_one_before_it_is_handed_on(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its small kernels wait for a place among the tower's while that one is hashed."""
    seen: list[str] = []
    begin, keep = CopyBack._begin, CopyBack._keep

    def begun(self: CopyBack, image: SplitImage, features: VisionFeatures) -> Any:
        seen.append(f"begin {image.path}")
        return begin(self, image, features)

    def kept(self: CopyBack, one: Any) -> None:
        if one is not None:
            seen.append(f"keep {one.image.path}")
        keep(self, one)

    monkeypatch.setattr(CopyBack, "_begin", begun)
    monkeypatch.setattr(CopyBack, "_keep", kept)
    images = draw_images(tmp_path / "images", 3)
    for number, file in enumerate(images):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(file)
    rows = write_rows(tmp_path / "train.jsonl", images)
    builder_of(make_config({"train": str(rows)}, cache={"patches_per_batch": 4096})).run("train", Silent())

    order = [entry.split()[1] for entry in seen if entry.startswith("begin")]
    a, b, c = order
    assert seen == [f"begin {a}", f"begin {b}", f"keep {a}", f"begin {c}", f"keep {b}", f"keep {c}"]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_shard_is_filled_while_the_one_before_is_committed(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is committed at a time; a third does not begin to count while the first is not done."""
    hold, committing = threading.Event(), []
    commit = ShardStream._commit

    def slow(self: ShardStream, shard: Any) -> None:
        committing.append(shard)
        assert hold.wait(60)
        commit(self, shard)

    monkeypatch.setattr(ShardStream, "_commit", slow)
    (tmp_path / "shards").mkdir()
    features = [random_features(n) for n in range(3)]
    size = features[0].num_bytes
    done = threading.Event()

    def write() -> None:
        with CacheWriter(tmp_path, FORMATS[form], shard_size=size, num_entries=3) as writer:
            for number, one in enumerate(features):
                writer.add(f"{number:064x}", one)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + 30
    while len(find_journals(tmp_path)) < 2:  # the second has its first entry
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(committing) == 1
    assert not done.is_set()
    assert committed_keys(tmp_path) == []
    hold.set()
    thread.join()
    assert len(committing) == 3
    assert len(committed_keys(tmp_path)) == 3


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries go into two shards at once, as those of full-resolution images do."""
    monkeypatch.setattr(writer, "LARGE_ENTRY", 0)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_large_entries_are_written_into_two_shards_at_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one entry is being written, the next one goes into another shard; the third waits."""
    hold, at_work = threading.Event(), set()
    write = ShardStream._write

    def slow(self: ShardStream, item: Any) -> None:
        at_work.add(threading.get_ident())
        assert hold.wait(60)
        write(self, item)

    monkeypatch.setattr(ShardStream, "_write", slow)
    (tmp_path / "shards").mkdir()
    entries = {f"{n:064x}": random_features(n) for n in range(7)}

    def add() -> None:
        with CacheWriter(tmp_path, FORMATS[form], shard_size=2 * random_features(0).num_bytes) as made:
            for key, features in entries.items():
                made.add(key, features)
                added.append(key)

    added: list[str] = []
    thread = threading.Thread(target=add)
    thread.start()
    deadline = time.monotonic() + 30
    while len(at_work) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(added) == 2
    hold.set()
    thread.join()
    assert committed_keys(tmp_path) == sorted(entries)
    assert sorted(len(shard.entries) for shard in load_shard_indexes(tmp_path)) == [1, 2, 2, 2]
    assert not find_journals(tmp_path)


def test_no_shard_stays_open_while_others_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few large images among many small ones."""
    (tmp_path / "shards").mkdir()
    small, large = random_features(0), random_features(1, tokens=40)
    monkeypatch.setattr(writer, "LARGE_ENTRY", large.num_bytes)
    with CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=4 * large.num_bytes) as made:
        for number in range(2):  # one each way
            made.add(f"{number:064x}", large)
        for number in range(2, 2 + 5 * large.num_bytes // small.num_bytes):
            made.add(f"{number:064x}", small)
        deadline = time.monotonic() + 30
        while f"{1:064x}" not in committed_keys(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("fails", [False, True])
def test_a_shard_that_is_let_go_when_the_writer_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """While the one before it is being committed: nothing is committed twice, and an error of that one is told."""
    hashed, at_work = shard_stream.file_checksum, threading.Event()

    def slow(path: Path) -> str:
        at_work.set()
        time.sleep(0.5)
        if fails:
            raise OSError(5, "Input/output error")
        return hashed(path)

    monkeypatch.setattr(shard_stream, "file_checksum", slow)
    (tmp_path / "shards").mkdir()
    entries = {f"{n:064x}": random_features(n) for n in range(3)}
    with (
        pytest.raises(OSError, match="Input/output") if fails else nullcontext(),
        CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=1 << 30) as made,
    ):
        first = made._streams[0]
        for key, features in entries.items():
            first.add(key, features, checksum(features))
            first.let_go()
            at_work.wait(60)
    assert committed_keys(tmp_path) == ([] if fails else sorted(entries))
    assert not find_journals(tmp_path)


def test_a_few_large_entries_go_both_ways_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LARGE_ENTRY", 0)
    (tmp_path / "shards").mkdir()
    with CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=1 << 30) as made:
        for number in range(6):
            made.add(f"{number:064x}", random_features(number))
            for stream in made._streams:
                stream._writing.drain()
    assert [len(shard.entries) for shard in load_shard_indexes(tmp_path)] == [3, 3]


@pytest.mark.usefixtures("all_are_large")
def test_an_error_of_either_way_is_told_at_the_next_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the other one has is kept."""
    write, broken = ShardStream._write, threading.Event()

    def one_breaks(self: ShardStream, item: Any) -> None:
        if item[0] == f"{1:064x}":
            broken.set()
            raise OSError(5, "Input/output error")
        assert broken.wait(60)
        write(self, item)

    monkeypatch.setattr(ShardStream, "_write", one_breaks)
    (tmp_path / "shards").mkdir()
    with CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=1 << 30) as made:
        made.add(f"{0:064x}", random_features(0))
        made.add(f"{1:064x}", random_features(1))
        made._streams[1]._writing.close()
        with pytest.raises(OSError, match="Input/output"):
            made.add(f"{2:064x}", random_features(2))
    assert committed_keys(tmp_path) == [f"{0:064x}"]
    assert not find_journals(tmp_path)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_shards_of_small_images_after_a_large_one(form: str, tmp_path: Path) -> None:
    """The room for the header was measured by the large one; shards close early rather than overflow."""
    (tmp_path / "shards").mkdir()
    entries = {f"{n:064x}": random_features(n, tokens=2000 if n == 0 else 1) for n in range(60)}
    with CacheWriter(tmp_path, FORMATS[form], shard_size=300_000, num_entries=60) as writer:
        for key, features in entries.items():
            writer.add(key, features)
    assert committed_keys(tmp_path) == sorted(entries)
    found = {}
    for path in (tmp_path / "shards").glob(f"*{FORMATS[form].suffix}"):
        reader = FORMATS[form].open(path)
        found |= {key: reader.read(key) for key in reader.keys()}  # noqa: SIM118  (not a mapping)
    for key, features in entries.items():
        assert_same(found[key], features)
