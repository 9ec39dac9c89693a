"""Where features come from does not change what is learned, and a step need not wait for them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cache.build import CacheBuilder
from cache.errors import CacheError, ConfigError, StoppedError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from train.features import CachedSource, FeatureSource, StepImage
from train.inputs import Inputs
from train.run import run_training
from train.sample import SampleImage
from train.step_dataset import StepDataset
from train.step_loader import make_loader

from ..range_server import Site  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import Run, job_of, stop_in_step

SETTINGS = {"effective_batch_size": 5, "num_train_epochs": 2, "learning_rate": 3e-3, "eval_split": None}
STEPS = 16


@pytest.fixture
def config(data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path) -> PipelineConfig:
    """The sample data, cached in small WebDataset shards."""
    splits = {"train": str(data_dir / "train.jsonl")}
    made = make_config(splits, cache={"dir": str(tmp_path / "features")}, train=SETTINGS)
    settings = made.cache.model_copy(update={"format": "webdataset", "shard_size": 100_000})
    CacheBuilder(made.model, made.data, settings, made.cache_dir).run("train", Silent())
    return made


@pytest.fixture
def train(config: PipelineConfig, tmp_path: Path) -> Callable[..., Run]:
    """Trains in a named run folder, reading from a given place."""

    def run(
        name: str,
        place: Path | str = config.cache_dir,
        *,
        stage_to: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        workers: int = 0,
    ) -> Run:
        trained = config.train.model_copy(update={"dataloader_num_workers": workers})
        cache = config.cache.model_copy(update={"stage_to": stage_to})
        job = replace(job_of(config), train=trained, cache=cache, cache_dir=place, output_dir=tmp_path / name)
        run_training(job, Silent(), should_stop)
        return Run(job.output_dir)

    return run


def assert_same_run(one: Run, other: Run) -> None:
    assert one.losses() == other.losses()
    assert len(one.losses()) == STEPS
    first, second = one.adapter(), other.adapter()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_over_http_the_adapter_is_bit_identical(
    train: Callable[..., Run], config: PipelineConfig, serve: Callable[[Path], Site], tmp_path: Path
) -> None:
    disk = train("disk")
    site = serve(config.cache_dir)
    site.faults = ["500", "truncate"]
    elsewhere = tmp_path / "elsewhere"
    shutil.move(config.cache_dir, elsewhere)
    site.folder = elsewhere
    assert_same_run(disk, train("http", site.url))
    assert site.shard_requests()
    assert not site.faults
    with pytest.raises(StoppedError, match="stopped after step 3"):  # in the middle of the first epoch
        train("parts", site.url, should_stop=stop_in_step(tmp_path / "parts", 3), workers=2)
    assert_same_run(disk, train("parts", site.url, workers=2))


def test_from_a_staged_copy_the_adapter_is_bit_identical(
    train: Callable[..., Run], config: PipelineConfig, serve: Callable[[Path], Site], tmp_path: Path
) -> None:
    disk = train("disk")
    assert_same_run(disk, train("staged", stage_to=tmp_path / "node"))
    site = serve(config.cache_dir)
    assert_same_run(disk, train("both", site.url, stage_to=tmp_path / "node"))
    assert not site.shard_requests(), "the copy that is there is used"


def test_errors_of_the_source_end_training(
    train: Callable[..., Run], config: PipelineConfig, serve: Callable[[Path], Site]
) -> None:
    site = serve(config.cache_dir)
    for shard in config.cache_dir.glob("*/shards/*.tar"):
        content = bytearray(shard.read_bytes())
        content[4000] ^= 1
        shard.write_bytes(content)
    with pytest.raises(CacheError, match=rf"(?s){site.url}.*cannot be read.*What to do"):
        train("run", site.url, workers=2)


def test_an_address_is_read_from_and_never_written_to(write_config: Callable[..., Path]) -> None:
    url = "https://host.example/features"
    config = load_config(write_config({"train": "train.jsonl"}, cache={"dir": url}))
    assert config.cache_source == url
    assert yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))["cache"]["dir"] == url
    with pytest.raises(ConfigError, match=r"(?s)only ever read from.*local folder"):
        config.cache_dir  # noqa: B018


@dataclass
class Watched(FeatureSource):
    """Counts what is read."""

    source: FeatureSource

    def __post_init__(self) -> None:
        self.keys: list[str] = []
        self.bytes_per_token = self.source.bytes_per_token

    def load(self, image: SampleImage) -> StepImage:
        self.keys.append(image.key)
        return self.source.load(image)


def steps_with(config: PipelineConfig, **train: Any) -> tuple[StepDataset, Watched]:
    inputs = Inputs.open(job_of(config))
    assert isinstance(inputs.source, CachedSource)
    watched = Watched(inputs.source)
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    settings = config.train.model_copy(update=train)
    return replace(inputs, source=watched).steps(samples, settings, shuffle=True), watched


def test_each_image_is_read_once_a_step(config: PipelineConfig) -> None:
    steps, watched = steps_with(config, order="image", effective_batch_size=12)
    saved = 0
    for number in range(len(steps)):
        watched.keys.clear()
        step = steps[0, number]
        uses = [image.key for i in steps.indices(0, number) for image in steps._samples[i].images]
        assert sorted(watched.keys) == sorted(set(uses))
        assert len(step.images) == len(watched.keys)
        saved += len(uses) - len(watched.keys)
    assert saved > 0, "some step has several questions on one image"


class _Announced(FeatureSource):
    """Leaves a file for each image that it reads, for a test to see from another process."""

    def __init__(self, source: FeatureSource, folder: Path) -> None:
        self._source, self._folder = source, folder
        self.bytes_per_token = source.bytes_per_token

    def load(self, image: SampleImage) -> StepImage:
        (self._folder / f"{time.monotonic_ns()}-{image.key[:8]}").touch()
        return self._source.load(image)


def test_workers_read_ahead_of_need(config: PipelineConfig, tmp_path: Path) -> None:
    """While the first step is in hand, the images of later steps are read, without anybody asking for them."""
    seen = tmp_path / "read"
    seen.mkdir()
    inputs = Inputs.open(job_of(config))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    settings = config.train.model_copy(update={"effective_batch_size": 4, "order": "sample"})
    steps = replace(inputs, source=_Announced(inputs.source, seen)).steps(samples, settings, shuffle=True)
    loader = make_loader(steps, num_workers=2, pin_memory=False, prefetch_factor=2, persistent_workers=False)
    batches = iter(loader)
    first = next(batches)
    taken = [{image.key for i in steps.indices(0, n) for image in samples.samples[i].images} for n in range(4)]
    wanted = sum(len(keys) for keys in taken)  # two workers, two steps each
    assert len(first.images) == len(taken[0]) < wanted
    deadline = time.monotonic() + 60
    while len(list(seen.iterdir())) < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(seen.iterdir())) >= wanted
    for _ in batches:
        pass
