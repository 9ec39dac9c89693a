"""Mutated shards: the right data, an error of ours, or a checksum that does not match. Never a crash or a hang."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.features import QUANTIZED_DTYPES, StoredFeatures
from cache.formats import FORMATS, ShardFormat
from cache.formats.base import checksum
from cache.quantize import quantize
from tests.cache.conftest import random_features

from .conftest import KEYS

EXACT = {key: random_features(n, tokens=2 + n, dtype="bfloat16") for n, key in enumerate(KEYS)}
# What a shard holds, by how its numbers are stored.
ENTRIES: dict[str, dict[str, StoredFeatures]] = {
    "bfloat16": {**EXACT},
    **{storage: {key: quantize(f, storage) for key, f in EXACT.items()} for storage in QUANTIZED_DTYPES},
}
SUMS = {storage: {key: checksum(f) for key, f in entries.items()} for storage, entries in ENTRIES.items()}
NUMBERS = [0, 1, 7, 255, 1 << 15, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1]
MAX_MEMORY = 1 << 22  # the shards have some 20 kB


class TooLarge(BaseException):
    """Memory was asked for that nothing in the file needs. No handler of an error takes it for one of the file."""


@contextmanager
def small_allocations(limit: int) -> Iterator[None]:
    """Tensors of more bytes than `limit` are refused, and what Python holds at any time must stay below it.

    Tensors are looked at where they are made, since tracemalloc does not see their memory, and since memory that is
    never touched costs nothing and is not noticed either.
    """
    empty = torch.empty

    def small(*args: Any, **more: Any) -> torch.Tensor:
        like = empty(*args, **{**more, "device": "meta"})
        if like.nbytes > limit:
            raise TooLarge(f"{like.nbytes} bytes for a tensor {tuple(like.shape)}")
        return empty(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", small)
        tracemalloc.start()
        try:
            yield
            assert tracemalloc.get_traced_memory()[1] < limit
        finally:
            tracemalloc.stop()


def test_an_allocation_that_is_too_large_is_seen() -> None:
    with small_allocations(1 << 16), pytest.raises(TooLarge):
        torch.empty(1 << 13, 3, dtype=torch.float32)
    with pytest.raises(AssertionError), small_allocations(1 << 16):
        bytes(1 << 17)


def mutated(whole: bytes, dice: random.Random) -> bytes:
    """One to three changes. Most hit places that are not zero: the structure, above all."""
    content = bytearray(whole)
    places = [n for n, byte in enumerate(whole) if byte]
    for _ in range(dice.choice([1, 1, 2, 3])):
        place = min(dice.choice(places), len(content) - 1) if dice.random() < 0.9 else dice.randrange(len(content))
        kind = dice.randrange(7)
        length = dice.choice([1, 2, 4, 8, 64, 600])
        if kind == 0:
            content[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            content[place : place + length] = dice.randbytes(length)
        elif kind == 2:
            size = dice.choice([2, 4, 8])
            number = dice.choice(NUMBERS) % (1 << 8 * size)
            content[place : place + size] = number.to_bytes(size, "little")
        elif kind == 3:
            del content[place : place + length]
        elif kind == 4:
            content[place:place] = dice.randbytes(length)
        elif kind == 5:
            source = dice.randrange(len(content))
            content[place : place + length] = content[source : source + length]
        else:
            del content[max(place, 1) :]
    return bytes(content)


def outcome(shard_format: ShardFormat, path: Path, sums: dict[str, str]) -> str:
    """What a reader says of a file, entry by entry, as a cache would take it."""
    try:
        reader = shard_format.open(path)
    except (ValueError, OSError):
        return "not opened"
    worst = "right data"
    for key in KEYS:
        try:
            features, found = reader.read_checked(key)
            assert found == checksum(features)
            if found != sums[key]:
                worst = "checksum"
        except (ValueError, OSError, KeyError):
            worst = "not read"
    reader.close()
    return worst


def run(shard_format: ShardFormat, storage: str, folder: Path, seed: int, count: int) -> Counter[str]:
    path = folder / f"shard{shard_format.suffix}"
    shard_format.write(path, list(ENTRIES[storage].items()))
    whole = path.read_bytes()
    dice = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        path.write_bytes(mutated(whole, dice))
        try:
            with small_allocations(MAX_MEMORY):
                outcomes[outcome(shard_format, path, SUMS[storage])] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, input {number}") from error
    return outcomes


@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_sample(tmp_path: Path, name: str, storage: str) -> None:
    outcomes = run(FORMATS[name], storage, tmp_path, seed=0, count=67)
    assert outcomes["not opened"] > 3
    assert outcomes["not read"] + outcomes["checksum"] > 3, outcomes


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("storage", ENTRIES)
@pytest.mark.parametrize("name", FORMATS)
def test_many(tmp_path: Path, name: str, storage: str, seed: int) -> None:
    """36 times 1000 inputs: 12,000 a format."""
    outcomes = run(FORMATS[name], storage, tmp_path, seed=seed, count=1000)
    assert outcomes.total() == 1000
