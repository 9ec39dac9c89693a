"""SIGKILL at random instants of whole runs: every format, worker processes, images in batches, the console script."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from cache import writer
from cache.copy_back import BATCHES_AHEAD, IN_FLIGHT
from cache.features import StoredFeatures
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.shard_stream import WAITING_SHARE
from cache.vision_tower import VisionTower
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, committed_keys, write_rows
from .test_crash import assert_recovers, assert_sound, held_keys, moved

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CONSOLE_SCRIPT = Path(sys.executable).with_name("pipeline")
IMAGES = 24
# What is different from run to run: how shards are written, whether other processes decode, images at once.
AS_LARGE = "as large entries"
VARIANTS: dict[str, dict[str, Any]] = {
    "safetensors": {},
    "safetensors, batches": {"patches_per_batch": 64},
    "safetensors, a worker, int8": {"num_workers": 1, "storage_dtype": "int8"},
    "webdataset": {"format": "webdataset"},
    "webdataset, a worker, batches": {"format": "webdataset", "num_workers": 1, "patches_per_batch": 64},
    "hdf5": {"format": "hdf5"},
    f"safetensors, {AS_LARGE}": {},
    "hdf5, a worker, batches": {"format": "hdf5", "num_workers": 1, "patches_per_batch": 64},
}


def draw_few_shapes(folder: Path) -> list[Path]:
    """Images of 4, 8 and 16 patches, so that batches of several images come about."""
    folder.mkdir()
    generator, files = torch.Generator().manual_seed(3), []
    for number in range(IMAGES):
        width, height = [(32, 32), (64, 32), (64, 64)][number % 3]
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        files.append(folder / f"{number}.png")
        Image.fromarray(pixels.numpy()).save(files[-1])
    return files


def most_in_a_batch(whole: FeatureCache, config: PipelineConfig) -> int:
    """Images that go through the tower together at most."""
    budget = config.cache.patches_per_batch
    shapes = Counter(image.image_grid_thw for image in whole.split("train").images)
    return 1 if budget is None else max(min(count, budget // prod(grid)) for grid, count in shapes.items())


def stored_sizes(whole: FeatureCache) -> list[int]:
    entries: list[StoredFeatures] = [whole.read_stored(key) for key in whole.keys()]  # noqa: SIM118  (not a mapping)
    return [entry.num_bytes for entry in entries]


def on_the_way(whole: FeatureCache, config: PipelineConfig) -> int:
    """Images that are computed and not in a shard yet, at most.

    A batch that the tower has ready; those that are copied back, of which one image may wait for the writer: two, and
    no more than two thirds of a shard's bytes, but one; and the writer's: a small share of them, or one image. An image
    whose bytes are in the shard, but not its line in the journal, is one of the writer's.
    """
    batch, size = most_in_a_batch(whole, config), min(stored_sizes(whole))
    copied = min(BATCHES_AHEAD * batch, max(batch, int(IN_FLIGHT * config.cache.shard_size * 2 / 3) // size))
    streams = writer.STREAMS if size >= writer.LARGE_ENTRY else 1
    return batch + copied + streams * max(1, int(WAITING_SHARE * config.cache.shard_size) // size)


def killed_after(config: PipelineConfig, seconds: float, encoded: Path) -> bool:
    """Cache in a process that is killed after some time; returns whether it was still at work.

    Each image that it encodes is noted in `encoded`, a file that outlives it.
    """

    def work() -> None:
        encode = VisionTower.encode

        def counted(self: VisionTower, pixels: Any, grids: Any) -> Any:
            features = encode(self, pixels, grids)
            with encoded.open("ab", buffering=0) as noted:
                noted.write(b"." * len(grids))
            return features

        VisionTower.encode = counted  # type: ignore[method-assign]
        builder_of(config).run("train", Silent())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
    child.join(seconds)
    child.kill()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def kills_over_whole_runs(tmp_path: Path, make_config: Any, variant: str, kills: int, seed: int) -> None:
    """Run after run from an empty folder, each killed at random instants until it is done; every entry is compared."""
    rows = write_rows(tmp_path / "train.jsonl", draw_few_shapes(tmp_path / "images"))
    config = make_config({"train": str(rows)}, cache=VARIANTS[variant])
    whole = FeatureCache(builder_of(config).run("train", SILENT).folder)
    # Some five shards.
    update = {"shard_size": sum(stored_sizes(whole)) // 5}
    config = config.model_copy(update={"cache": config.cache.model_copy(update=update)})
    started = time.perf_counter()
    assert not killed_after(moved(config, tmp_path / "timed"), 60, tmp_path / "timed.count")
    whole_time = time.perf_counter() - started
    dice, done, run = random.Random(seed), 0, 0
    while done < kills:
        run += 1
        this, encoded = moved(config, tmp_path / str(run)), tmp_path / f"{run}.count"
        killed = True
        while killed:
            before, held = committed_keys(this.cache_dir), held_keys(this.cache_dir)
            encoded.write_bytes(b"")
            killed = killed_after(this, dice.uniform(0, whole_time), encoded)
            done += killed
            after = committed_keys(this.cache_dir)
            assert set(before) <= set(after)
            assert len(after) == len(set(after)), "an entry twice"
            count = encoded.stat().st_size
            assert count <= len(whole) - len(held), "something was encoded that a killed run had left"
            assert held <= held_keys(this.cache_dir)
            lost = count - (len(held_keys(this.cache_dir)) - len(held))
            assert lost <= (on_the_way(whole, this) if killed else 0), "more than what is on its way is lost"
            assert_sound(this.cache_dir, whole)
        assert_recovers(this, whole)
        shutil.rmtree(this.cache_dir)


@pytest.fixture(autouse=True)
def written_as_large_entries_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into two shards at once."""
    if AS_LARGE in request.node.callspec.params["variant"]:
        monkeypatch.setattr(writer, "LARGE_ENTRY", 0)


@pytest.mark.parametrize(
    "variant", ["safetensors", "webdataset, a worker, batches", "hdf5", f"safetensors, {AS_LARGE}"]
)
def test_some_kills_over_whole_runs(tmp_path: Path, make_config: Any, variant: str) -> None:
    kills_over_whole_runs(tmp_path, make_config, variant, 3, seed=5)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_kills_over_whole_runs(tmp_path: Path, make_config: Any, variant: str) -> None:
    kills_over_whole_runs(tmp_path, make_config, variant, 40, seed=6)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "variant", ["safetensors, batches", "webdataset, a worker, batches", "hdf5, a worker, batches"]
)
def test_kills_of_the_console_script(tmp_path: Path, make_config: Any, variant: str) -> None:
    """The command as a user gives it, with all its processes; a kill comes once it has begun to write, or never."""
    rows = write_rows(tmp_path / "train.jsonl", draw_few_shapes(tmp_path / "images"))
    config = make_config({"train": str(rows)}, cache={**VARIANTS[variant], "shard_size": 12_000})
    whole = FeatureCache(builder_of(config).run("train", SILENT).folder)
    dice, kills, run = random.Random(7), 0, 0
    while kills < 7:
        run += 1
        this = moved(config, tmp_path / str(run))
        file = tmp_path / f"{run}.yaml"
        file.write_text(yaml.safe_dump(json.loads(this.model_dump_json(exclude_unset=True))))
        killed = True
        while killed:
            held = held_keys(this.cache_dir)
            killed = _killed_command(file, this.cache_dir, dice.uniform(0, 0.4))
            kills += killed
            assert held <= held_keys(this.cache_dir)
            assert_sound(this.cache_dir, whole)
        assert_recovers(this, whole)


def _killed_command(config: Path, folder: Path, seconds: float) -> bool:
    """Run `pipeline cache`, and kill it so long after it has begun another shard; returns whether it was at work."""

    def files() -> set[Path]:
        return set(folder.glob("*/shards/*"))

    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [str(CONSOLE_SCRIPT), "cache", "--config", str(config), "--split", "train"]
    before = files()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    while process.poll() is None and files() <= before:
        time.sleep(0.005)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # as an out-of-memory killer or a scheduler does it
    out, _ = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGKILL), out
    return process.returncode != 0
