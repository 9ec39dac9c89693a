"""Reading by two threads: every byte, in order, an error of either thread, and alone where two do not help."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache.features import QuantizedFeatures
from cache.formats import FORMATS, relay
from cache.formats.base import checksum
from cache.formats.relay import Part, Reader
from cache.quantize import quantize
from tests.cache.conftest import random_features

PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 bytes, and two threads for all that is read, on two processors or more."""
    monkeypatch.setattr(relay, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(relay, "WORTH_A_THREAD", 0)
    monkeypatch.setattr(relay, "PATIENCE", 2.0)  # of 1: never
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def parts_of(*sizes: int) -> list[Part]:
    return [(memoryview(bytearray(size)), 1000 * number) for number, size in enumerate(sizes)]


class Source:
    """Bytes that tell their place; may fail at one, and tells which threads have read."""

    def __init__(self, fail_at: int | None = None, pause: Callable[[], float] = lambda: 0.0) -> None:
        self.threads: set[str] = set()
        self._fail_at, self._pause = fail_at, pause

    def read(self, target: memoryview, offset: int) -> None:
        self.threads.add(threading.current_thread().name)
        time.sleep(self._pause())
        if self._fail_at is not None and offset <= self._fail_at < offset + len(target):
            raise ValueError(f"no byte {self._fail_at}")
        target[:] = self.content(offset, len(target))

    def content(self, offset: int, size: int) -> bytes:
        return (
            random.Random(offset // PIECE).randbytes(size)
            if size <= PIECE
            else b"".join(self.content(offset + start, min(PIECE, size - start)) for start in range(0, size, PIECE))
        )


@pytest.mark.parametrize("sizes", [(0,), (1,), (PIECE,), (PIECE + 1, 0, 3), (30 * PIECE, 7, 20 * PIECE - 1)])
def test_every_byte_arrives_in_order(sizes: tuple[int, ...]) -> None:
    for seed in range(5):
        dice = random.Random(seed)
        source = Source(pause=lambda dice=dice: dice.choice([0.0, 0.0005]))  # type: ignore[misc]
        parts, seen = parts_of(*sizes), bytearray()
        Reader().read(parts, source.read, seen.extend)
        expected = [source.content(offset, len(memory)) for memory, offset in parts]
        assert [bytes(memory) for memory, _ in parts] == expected
        assert bytes(seen) == b"".join(expected)
        assert len(source.threads) == 2 or sum(sizes) < 10 * PIECE


@pytest.mark.parametrize("place", [0, 5 * PIECE, 39 * PIECE])
def test_a_failure_ends_both_threads(place: int) -> None:
    for _ in range(10):  # either thread may be the one that meets it
        source = Source(fail_at=place, pause=lambda: 0.0002)
        seen = bytearray()
        with pytest.raises(ValueError, match=f"no byte {place}"):
            Reader().read(parts_of(40 * PIECE), source.read, seen.extend)
        assert source.content(0, place).startswith(bytes(seen))
        assert not [thread for thread in threading.enumerate() if thread.name == "cache-read"]


def test_a_failure_of_the_one_who_is_handed_the_bytes() -> None:
    def refuse(memory: memoryview) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Reader().read(parts_of(40 * PIECE), Source().read, refuse)
    assert not [thread for thread in threading.enumerate() if thread.name == "cache-read"]


def test_an_interruption_while_the_other_thread_reads_ends_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the caller hears of it, nobody touches the memory any more, and nobody waits for ever."""
    main, taken = threading.current_thread(), threading.Event()
    take = relay._Relay._take

    def helper_first(self: relay._Relay) -> int | None:
        if threading.current_thread() is main:
            taken.wait(10)
            return take(self)
        number = take(self)
        taken.set()
        return number

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def slow(_target: memoryview, _offset: int) -> None:
        time.sleep(1.0)
        done.append(True)

    done: list[bool] = []
    monkeypatch.setattr(relay._Relay, "_take", helper_first)
    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, 0.3)  # pytest-timeout's, to be set again
    try:
        with pytest.raises(KeyboardInterrupt):
            Reader().read(parts_of(PIECE), slow, lambda _: None)
        assert done, "somebody still writes into the memory"
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_where_the_second_thread_is_slow_the_next_entries_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PATIENCE", 0.5)
    reader, main = Reader(), threading.current_thread().name

    def threads_of_one_entry(delay: float) -> set[str]:
        source = Source()

        def read(target: memoryview, offset: int) -> None:
            if threading.current_thread().name != main:
                time.sleep(delay)
            source.read(target, offset)
            time.sleep(0.001)  # lets the other one have its share

        reader.read(parts_of(20 * PIECE), read, lambda _: None)
        return source.threads

    assert threads_of_one_entry(delay=0.2) == {main, "cache-read"}
    for _ in range(relay.PAUSE):
        assert threads_of_one_entry(delay=0.0) == {main}
    assert threads_of_one_entry(delay=0.0) == {main, "cache-read"}


def test_one_processor_and_small_entries_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WORTH_A_THREAD", 40 * PIECE + 1)
    source = Source()
    Reader().read(parts_of(40 * PIECE), source.read, lambda _: None)
    monkeypatch.setattr(relay, "WORTH_A_THREAD", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    Reader().read(parts_of(40 * PIECE), source.read, lambda _: None)
    assert source.threads == {threading.current_thread().name}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("storage", ["exact", "int8"])
@pytest.mark.parametrize("levels", [0, 3])
def test_the_checksum_of_what_was_read(tmp_path: Path, name: str, storage: str, levels: int) -> None:
    """The same as over the tensors, and another one wherever a bit is flipped: in new memory and in given one."""
    exact = random_features(1, tokens=40, levels=levels)
    features = exact if storage == "exact" else quantize(exact, "int8")
    assert isinstance(features, QuantizedFeatures) == (storage == "int8")
    path, key = tmp_path / f"shard{FORMATS[name].suffix}", f"{1:064x}"
    FORMATS[name].write(path, [(key, features)])
    whole = path.read_bytes()
    out = torch.empty(FORMATS[name].open(path).extents(key).out_bytes, dtype=torch.uint8)
    for field, tensor in [(None, None), *features.tensors().items()]:
        content = bytearray(whole)
        if tensor is not None and tensor.numel() and field != "image_grid_thw":
            numbers = tensor.numpy().tobytes()
            content[whole.index(numbers) + len(numbers) - 1] ^= 1
        path.write_bytes(content)
        reader = FORMATS[name].open(path)
        for memory in (None, out):
            read, found = reader.read_checked(key, memory)
            assert found == checksum(read)
            assert (found == checksum(features)) == (bytes(content) == whole)
        reader.close()
