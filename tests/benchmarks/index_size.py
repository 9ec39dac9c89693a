"""How long the index of a large cache takes to open, how much memory, and how long a key takes to find.

`python -m tests.benchmarks.index_size [--folder DIR] [--images 1000000]` prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cache.index import EntryIndex, update_index_file
from cache.index_file import INDEX_FILE
from cache.manifest import save_manifest
from cache.reader import FeatureCache
from cache.seal import seal
from cache.split_files import split_file
from tests.manifests import manifest_of

ENTRY_BYTES, SHARD_BYTES = 40 << 20, 1 << 30
LOOKUPS = 100_000
SPLIT = "train"


def make_cache(folder: Path, images: int) -> None:
    """JSON indexes as a run leaves them, 26 entries of 40 MiB a shard; the shards have sizes but take no space."""
    save_manifest(folder, manifest_of("safetensors", dtype="bfloat16", hidden_size=4096))
    dice, listed = random.Random(0), []
    per_shard = -(-SHARD_BYTES // ENTRY_BYTES)
    for start in range(0, images, per_shard):
        count = min(per_shard, images - start)
        name = f"shard-{dice.randbytes(8).hex()}"
        entries = [
            {"key": dice.randbytes(32).hex(), "image_grid_thw": [1, 64, 80], "checksum": dice.randbytes(16).hex()}
            for _ in range(count)
        ]
        listed += [
            {"path": f"images/{start // 1000:04d}/{start + n:08d}.jpg", "size": 300_000, "mtime_ns": 10**18 + start + n}
            | {field: entry[field] for field in ("key", "image_grid_thw")}
            for n, entry in enumerate(entries)
        ]
        index = {
            "shard": f"{name}.safetensors",
            "num_bytes": count * ENTRY_BYTES,
            "checksum": dice.randbytes(16).hex(),
            "entries": entries,
        }
        # Not through save_shard_index: 40,000 fsyncs are not what is measured.
        (folder / "shards" / f"{name}.json").write_text(seal(json.dumps(index, separators=(",", ":"))))
        with (folder / "shards" / f"{name}.safetensors").open("wb") as shard:
            shard.truncate(count * ENTRY_BYTES)
    split = {"split": SPLIT, "source": "-", "num_records": images, "images": listed, "refused": {}, "num_parts": 1}
    split_file(folder, SPLIT).write_text(seal(json.dumps(split, separators=(",", ":"))))


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(folder: Path) -> dict[str, float]:
    """In a process of its own: seconds to open, bytes before and after, seconds a lookup."""
    before = resident_bytes()
    started = time.perf_counter()
    cache = FeatureCache(folder, verify_checksums=False)
    opened = time.perf_counter() - started
    after = resident_bytes()
    index = EntryIndex.open(folder)
    keys = random.Random(1).sample(index.keys(), min(LOOKUPS, len(index)))
    started = time.perf_counter()
    for key in keys:
        cache.shard_of(key)
    found = (time.perf_counter() - started) / len(keys)
    unknown = [random.Random(n).randbytes(32).hex() for n in range(1000)]
    started = time.perf_counter()
    missing = sum(key not in index for key in unknown)
    not_found = (time.perf_counter() - started) / len(unknown)
    assert missing == len(unknown)
    started = time.perf_counter()
    images = cache.split(SPLIT).images
    split_opened = time.perf_counter() - started
    split_bytes = resident_bytes() - after
    keys = [image.key for image in images]
    started = time.perf_counter()
    assert EntryIndex.open(folder).missing([*keys, *unknown]) == list(range(len(keys), len(keys) + len(unknown)))
    planned = time.perf_counter() - started
    return {
        "open": opened,
        "before": before,
        "after": after,
        "found": found,
        "not_found": not_found,
        "split": split_opened,
        "split_bytes": split_bytes,
        "planned": planned,
    }


def report(what: str, folder: Path) -> None:
    """Measure three times, each in a fresh process; print the median by opening time."""
    command = [sys.executable, "-m", "tests.benchmarks.index_size", "--measure", str(folder)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    run = sorted(runs, key=lambda r: r["open"])[1]
    memory = f"{run['after'] / 1e6:.0f} MB | {(run['after'] - run['before']) / 1e6:.0f} MB"
    print(
        f"| {what} | {run['open']:.2f} s | {memory} | {run['found'] * 1e6:.1f} us | {run['not_found'] * 1e6:.1f} us "
        f"| {run['split']:.1f} s, {run['split_bytes'] / 1e6:.0f} MB | {run['planned']:.1f} s |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", type=Path)
    options.add_argument("--images", type=int, default=1_000_000)
    options.add_argument("--measure", type=Path)
    chosen = options.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure)))
        return
    folder = Path(tempfile.mkdtemp(dir=chosen.folder))
    try:
        make_cache(folder, chosen.images)
        print("| | open | process | of it the index | find a key | find none | open a split | what is missing |")
        print("|---|---|---|---|---|---|---|---|")
        started = time.perf_counter()
        update_index_file(folder)
        writing = time.perf_counter() - started
        report(INDEX_FILE, folder)
        saved = (folder / INDEX_FILE).stat().st_size
        (folder / INDEX_FILE).unlink()
        report("JSON indexes alone", folder)
        print(f"\n{chosen.images} images; writing {INDEX_FILE} ({saved / 1e6:.0f} MB) from JSON took {writing:.1f} s")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
