"""The index is read while another process commits shards: parts, `pipeline status` and `pipeline submit` do so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cache.index import EntryIndex
from cache.manifest import SHARDS

COMMITS = 400
# As the writer does it: a shard, then its index. The names are in no order, as the true ones.
COMMITTING = f"""
import sys
from pathlib import Path
from cache.atomic import put_in_place
from cache.manifest import SHARDS, IndexEntry, ShardIndex, save_shard_index

folder = Path(sys.argv[1])
for number in range({COMMITS}):
    shard = folder / SHARDS / f"shard-{{number * 0x9E3779B97F4A7C15 % 2**64:016x}}.safetensors"
    aside = folder / f"{{number}}.tmp"
    aside.write_bytes(b"features")
    put_in_place(aside, shard)
    entry = IndexEntry(key=f"{{number:064x}}", image_grid_thw=(1, 2, 2), checksum="0" * 32)
    save_shard_index(folder, ShardIndex(shard=shard.name, num_bytes=8, checksum="0" * 32, entries=[entry]))
"""


def test_a_shard_that_is_committed_while_the_folder_is_listed_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / SHARDS).mkdir()
    writer = subprocess.Popen([sys.executable, "-c", COMMITTING, tmp_path])

    seen = set()
    while writer.poll() is None:
        seen.add(len(EntryIndex.open(tmp_path)))

    assert writer.returncode == 0
    assert len(seen) > 3  # it was read meanwhile
    assert len(EntryIndex.open(tmp_path)) == COMMITS
