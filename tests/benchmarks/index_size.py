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
from cache.manifest import Manifest, save_manifest
from cache.reader import FeatureCache
from cache.seal import seal

ENTRY_BYTES, SHARD_BYTES = 40 << 20, 1 << 30
LOOKUPS = 100_000


def make_cache(folder: Path, images: int) -> None:
    """JSON indexes as a run leaves them, 26 entries of 40 MiB a shard; the shards have sizes but take no space."""
    manifest = Manifest(
        format_version=1,
        format="safetensors",
        dtype="bfloat16",
        hidden_size=4096,
        num_deepstack_levels=3,
        fingerprint={"dtype": "bfloat16"},
        made_by={},
    )
    save_manifest(folder, manifest)
    dice = random.Random(0)
    per_shard = -(-SHARD_BYTES // ENTRY_BYTES)
    for start in range(0, images, per_shard):
        count = min(per_shard, images - start)
        name = f"shard-{dice.randbytes(8).hex()}"
        entries = [
            {"key": dice.randbytes(32).hex(), "image_grid_thw": [1, 64, 80], "checksum": dice.randbytes(16).hex()}
            for _ in range(count)
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
    return {"open": opened, "before": before, "after": after, "found": found, "not_found": not_found}


def report(what: str, folder: Path) -> None:
    """Measure three times, each in a fresh process; print the median by opening time."""
    command = [sys.executable, "-m", "tests.benchmarks.index_size", "--measure", str(folder)]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    run = sorted(runs, key=lambda r: r["open"])[1]
    memory = f"{run['after'] / 1e6:.0f} MB | {(run['after'] - run['before']) / 1e6:.0f} MB"
    print(
        f"| {what} | {run['open']:.2f} s | {memory} | {run['found'] * 1e6:.1f} us | {run['not_found'] * 1e6:.1f} us |",
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
        print("| | open | process | of it the index | find a key | find none |\n|---|---|---|---|---|---|")
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
