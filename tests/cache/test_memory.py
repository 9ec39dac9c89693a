"""The memory that caching takes does not grow with what it writes, only by what a list of images needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cache.reader import FeatureCache

from .conftest import write_rows

FEW, MANY = 1_000, 8_000
MOST_AN_IMAGE = 6_000  # bytes: its record, its place in the list, its entry in indexes


def peak_memory(folder: Path, write_config: Callable[..., Path], count: int) -> tuple[int, int]:
    """Bytes at the peak of `pipeline cache` over so many images, and those of their features."""
    images = folder / "images"
    images.mkdir(parents=True)
    base, files = Image.new("RGB", (128, 128), (40, 90, 200)), []
    for number in range(count):
        base.putpixel((0, 0), (number % 256, number // 256, 0))
        files.append(images / f"{number}.bmp")
        base.save(files[-1])
    rows = write_rows(folder / "train.jsonl", files)
    settings: dict[str, Any] = {"shard_size": 8 << 20, "num_workers": 1, "patches_per_batch": 4096}
    config = write_config({"train": str(rows)}, cache={**settings, "dir": str(folder / "features")})
    command = [str(Path(sys.executable).with_name("pipeline")), "cache", "--config", str(config), "--split", "train"]
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    cache = FeatureCache(next((folder / "features").iterdir()))
    assert len(cache) == count
    written = cache.num_bytes
    shutil.rmtree(folder)
    return usage.ru_maxrss * 1024, written


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_memory_does_not_grow_with_what_is_written(tmp_path: Path, write_config: Callable[..., Path]) -> None:
    few, few_bytes = peak_memory(tmp_path / "few", write_config, FEW)
    many, many_bytes = peak_memory(tmp_path / "many", write_config, MANY)
    print(f"{FEW} images: {few / 1e6:.0f} MB, {MANY}: {many / 1e6:.0f} MB; written {many_bytes / 1e6:.0f} MB")
    grown = many - few
    assert grown < MOST_AN_IMAGE * (MANY - FEW)
    assert many_bytes - few_bytes > 4 * MOST_AN_IMAGE * (MANY - FEW), "the features are too small to tell"
