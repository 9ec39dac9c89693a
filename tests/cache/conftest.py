"""Small drawn images, splits over them, random features, and ways to look at a cache folder from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from cache.build import CacheBuilder
from cache.checkpoint import INDEX_FILE
from cache.features import VisionFeatures
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.vision_tower import VisionTower
from pipeline.config import PipelineConfig

SILENT = Silent()
DRAWN = 1_600_000_000  # long ago: a scan does not rely on the time of a file that was just written


def draw_images(folder: Path, count: int, *, seed: int = 0) -> list[Path]:
    """PNG files of different contents and shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        width, height = (int(n) * 32 for n in torch.randint(1, 5, (2,), generator=generator))
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        file = folder / f"{seed}-{number}.png"
        Image.fromarray(pixels.numpy()).save(file)
        os.utime(file, (DRAWN, DRAWN))
        files.append(file)
    return files


def write_rows(file: Path, images: Iterable[Path | str | list[str]]) -> Path:
    """A flat JSONL split, one question an item; paths are relative to the folder of the file."""
    rows = []
    for image in images:
        names = image if isinstance(image, list) else [str(image)]
        names = [str(Path(n).relative_to(file.parent)) if Path(n).is_absolute() else n for n in names]
        rows.append({"image": names, "question": "What is it?", "answer": "Noise."})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def builder_of(config: PipelineConfig) -> CacheBuilder:
    """The cache stage of a configuration."""
    return CacheBuilder(config.model, config.data, config.cache, config.cache_dir)


def random_features(seed: int, *, tokens: int = 6, levels: int = 3, dtype: str = "float32") -> VisionFeatures:
    """Features of width 8."""
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn((tokens, 8), generator=generator).to(getattr(torch, dtype))
    deepstack = torch.randn((levels, tokens, 8), generator=generator).to(getattr(torch, dtype))
    return VisionFeatures(embeds, deepstack, torch.tensor([1, 2, 2 * tokens]))


def assert_same(one: VisionFeatures, other: VisionFeatures) -> None:
    """Equal in dtype, shape and every bit."""
    for name in ("image_embeds", "deepstack_features", "image_grid_thw"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8)), name


def assert_same_entries(folder: Path, other: Path) -> None:
    """Two caches hold the same keys with the same features."""
    one, two = FeatureCache.open(folder), FeatureCache.open(other)
    assert one.keys() == two.keys()
    for key in one.keys():  # noqa: SIM118  (not a mapping)
        assert_same(one.read(key), two.read(key))


def committed_keys(folder: Path) -> list[str]:
    """The keys that the indexes below `folder` list, sorted, an entry that is listed twice standing twice."""
    indexes = [json.loads(file.read_text()) for file in folder.glob("**/shards/*.json")]
    return sorted(entry["key"] for index in indexes for entry in index["entries"])


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and modification time of every file below `folder`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(file.relative_to(folder)): (file.stat().st_ino, file.stat().st_size, file.stat().st_mtime_ns)
        for file in files
    }


@pytest.fixture
def tower_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts how often the tower is loaded and how many images it encodes; the real one does the work."""
    calls = {"load": 0, "encode": 0}
    load, encode = VisionTower.load, VisionTower.encode

    def counting_load(*args: Any, **kwargs: Any) -> VisionTower:
        calls["load"] += 1
        return load(*args, **kwargs)

    def counting_encode(self: VisionTower, pixels: Any, grids: Any) -> list[VisionFeatures]:
        calls["encode"] += len(grids)
        return encode(self, pixels, grids)

    monkeypatch.setattr(VisionTower, "load", counting_load)
    monkeypatch.setattr(VisionTower, "encode", counting_encode)
    return calls


@pytest.fixture
def cached(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> tuple[CacheBuilder, PipelineConfig]:
    """Four images in several shards, cached."""
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 4))
    config = make_config({"train": str(rows)}, cache={"shard_size": 12_000})
    builder = builder_of(config)
    builder.run("train", SILENT)
    return builder, config


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"A FULL DISK IS NOT TESTED FOR REAL HERE: no tmpfs can be mounted ({reason.strip()})")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, *, leave: int) -> Path:
    """Takes the free space but for `leave` bytes; returns the file to remove again."""
    file = folder / "filler"
    file.write_bytes(bytes(shutil.disk_usage(folder).free - leave))
    return file


@pytest.fixture
def checkpoint(tmp_path: Path, tiny: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))


@pytest.fixture
def sharded(tmp_path: Path, tiny: Path) -> Path:
    """The same checkpoint in files of at most 1 MB, with an index."""
    folder = Path(shutil.copytree(tiny, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors")))
    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]
