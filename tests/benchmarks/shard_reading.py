"""How fast 40 MiB entries are read, for each shard format, against the fastest plain read of the same bytes.

`python -m tests.benchmarks.shard_reading [--folder DIR] [--entries 32] [--rounds 9]` prints tables.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from cache.features import VisionFeatures
from cache.formats import FORMATS, relay
from cache.manifest import save_manifest
from cache.reader import FeatureCache
from cache.writer import CacheWriter
from tests.manifests import manifest_of

TOKENS, WIDTH, LEVELS = 1280, 4096, 3
MIB = 1 << 20
ENTRIES_A_SHARD = 8


def make_cache(folder: Path, name: str, entries: int) -> Path:
    """A cache of random bfloat16 features of the 8B's shapes at 1036x1288."""
    made = folder / name
    save_manifest(made, manifest_of(name, dtype="bfloat16", hidden_size=WIDTH, num_deepstack_levels=LEVELS))
    with CacheWriter(made, FORMATS[name], shard_size=ENTRIES_A_SHARD * 40 * MIB) as writer:
        for number in range(entries):
            generator = torch.Generator().manual_seed(number)
            bits = torch.randint(-(1 << 15), 1 << 15, (1 + LEVELS, TOKENS, WIDTH), generator=generator)
            whole = bits.to(torch.int16).view(torch.bfloat16)
            grid = torch.tensor([1, 64, 80])
            writer.add(f"{number:064x}", VisionFeatures(whole[0].clone(), whole[1:].clone(), grid))
    return made


def page_memory(size: int) -> mmap.mmap:
    """Memory that starts on a page, as pinned and shared memory does: the kernel copies to it fastest."""
    return mmap.mmap(-1, size)


class PlainRead:
    """os.preadv of an entry's bytes into a buffer that is there already: nothing can be faster from a file."""

    def __init__(self, folder: Path, keys: list[str], size: int) -> None:
        shards = sorted((folder / "shards").glob("*.safetensors"))
        self._files = [os.open(shard, os.O_RDONLY) for shard in shards]
        self._buffer = memoryview(page_memory(size))
        self._places = {key: divmod(number, ENTRIES_A_SHARD) for number, key in enumerate(keys)}
        self._helper = ThreadPoolExecutor(1)

    def __call__(self, key: str) -> None:
        self._read(key, 0, len(self._buffer))

    def by_two_threads(self, key: str) -> None:
        """The same, half by each of two threads."""
        middle = len(self._buffer) // 2
        other = self._helper.submit(self._read, key, middle, len(self._buffer))
        self._read(key, 0, middle)
        other.result()

    def _read(self, key: str, done: int, end: int) -> None:
        shard, number = self._places[key]
        while done < end:
            done += os.preadv(self._files[shard], [self._buffer[done:end]], number * len(self._buffer) + done)

    def close(self) -> None:
        """Release the files."""
        self._helper.shutdown()
        for file in self._files:
            os.close(file)


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the shards."""
    for shard in (folder / "shards").iterdir():
        file = os.open(shard, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def seconds_for(read: Callable[[str], object], keys: list[str]) -> float:
    """Of reading all keys."""
    started = time.perf_counter()
    for key in keys:
        read(key)
    return time.perf_counter() - started


def readers(caches: dict[str, Path], keys: list[str], plain: PlainRead) -> dict[str, Callable[[str], object]]:
    """What is measured, by name. `out` is memory that every read uses again, as a ring of pinned buffers is."""
    found: dict[str, Callable[[str], object]] = {"plain": plain, "plain, two threads": plain.by_two_threads}
    for name, folder in caches.items():
        exact, checked = (FeatureCache(folder, verify_checksums=verify) for verify in (False, True))
        out = torch.frombuffer(page_memory(exact.out_bytes(keys[0])), dtype=torch.uint8)
        found[f"{name}, no checksum"] = partial(exact.read, out=out)
        found[f"{name}, checksum"] = partial(checked.read, out=out)
        found[f"{name}, checksum, one thread"] = partial(read_alone, checked, out=out)
        found[f"{name}, checksum, fresh memory"] = checked.read
    return found


def read_alone(cache: FeatureCache, key: str, out: torch.Tensor) -> None:
    """As where no processor is free for a second thread."""
    usual, relay.WORTH_A_THREAD = relay.WORTH_A_THREAD, sys.maxsize
    cache.read(key, out)
    relay.WORTH_A_THREAD = usual


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path)
    options.add_argument("--entries", type=int, default=32)
    options.add_argument("--rounds", type=int, default=9)
    chosen = options.parse_args()
    folder = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        measure(folder, chosen.entries, chosen.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, entries: int, rounds: int) -> None:
    """Warm rounds take turns, so that whatever else the machine does falls on all alike; cold rounds follow."""
    keys = [f"{number:064x}" for number in range(entries)]
    caches = {name: make_cache(folder, name, entries) for name in FORMATS}
    size = (1 + LEVELS) * TOKENS * WIDTH * 2
    plain = PlainRead(caches["safetensors"], keys, size)
    measured = readers(caches, keys, plain)
    warm: dict[str, list[float]] = {name: [] for name in measured}
    for round_number in range(rounds + 1):
        order = random.Random(round_number).sample(keys, entries)
        for name, read in measured.items():
            seconds = seconds_for(read, order)
            if round_number:  # the first one fills the page cache
                warm[name].append(seconds)
    print(f"{entries} entries of {size / MIB:.0f} MiB in random order, {os.cpu_count()} CPUs, {rounds} rounds, medians")
    print("\n| page cache warm | GB/s | of plain |\n|---|---|---|")
    # Ratios within a round: the speed of the machine drifts between rounds.
    for name, seconds_all in warm.items():
        ratio = statistics.median(p / s for p, s in zip(warm["plain"], seconds_all, strict=True))
        print(f"| {name} | {entries * size / statistics.median(seconds_all) / 1e9:.2f} | {ratio:.2f} |")
    print("\n| page cache cold | GB/s | of plain |\n|---|---|---|")
    cold: dict[str, list[float]] = {name: [] for name in measured if "fresh" not in name and "one" not in name}
    for round_number in range(3):
        order = random.Random(round_number).sample(keys, entries)
        for name, seconds_all in cold.items():
            drop_page_cache(caches.get(name.split(",")[0], caches["safetensors"]))
            seconds_all.append(seconds_for(measured[name], order))
    for name, seconds_all in cold.items():
        seconds, plain_seconds = statistics.median(seconds_all), statistics.median(cold["plain"])
        print(f"| {name} | {entries * size / seconds / 1e9:.2f} | {plain_seconds / seconds:.2f} |")
    plain.close()


if __name__ == "__main__":
    main()
