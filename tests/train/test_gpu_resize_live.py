"""The live path with images resized on a GPU: workers decode, the training process resizes; the cache's numbers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor
from transformers.utils import is_torchvision_available

from cache.build import CacheBuilder
from cache.errors import ConfigError
from cache.keys import image_key
from cache.preprocess import ImageProcessor
from cache.progress import Silent
from cache.records import ImageRef
from pipeline.config import PipelineConfig
from tests.train.conftest import job_of
from train.compare import compare_with_live
from train.features import DecodedImage, FeatureSource, LiveSource, StepImage, features_on
from train.inputs import Inputs, load_tower
from train.sample import SampleImage

MakeConfig = Callable[..., PipelineConfig]
NEEDS_GPU = pytest.mark.skipif(
    not (is_torchvision_available() and torch.cuda.is_available()),
    reason="RESIZING ON A GPU IS NOT TESTED HERE: it needs a GPU and torchvision",
)


@pytest.fixture
def on_gpu(data_dir: Path, make_config: MakeConfig) -> PipelineConfig:
    """The sample data, resized on the GPU and cached."""
    config = make_config(
        {"train": str(data_dir / "train.jsonl")},
        cache={"image_processor_device": "cuda"},
    )
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    return config


def test_without_a_gpu_there_is_no_live_path(make_config: MakeConfig) -> None:
    job = job_of(make_config({"train": "none.jsonl"}, cache={"image_processor_device": "cuda"}))
    with pytest.raises(ConfigError, match=r"images are to be resized on a GPU, .* runs on cpu\n"):
        load_tower(job, torch.device("cpu"))


def test_where_images_are_resized_makes_another_run(make_config: MakeConfig) -> None:
    def settings_of(device: str) -> dict[str, object]:
        return job_of(make_config({"train": "none.jsonl"}, cache={"image_processor_device": device})).settings()

    on_cpu, on_gpu = settings_of("cpu"), settings_of("cuda")
    assert on_gpu == on_cpu | {"cache.image_processor_device": "cuda"}
    assert "cache.image_processor_device" not in on_cpu  # as in runs from before there was a choice


def test_a_worker_leaves_resizing_to_the_training_process(tiny: Path, data_dir: Path) -> None:
    # Decoding is Pillow's with either backend.
    processor = ImageProcessor(AutoImageProcessor.from_pretrained(tiny), "cuda")
    file = data_dir / "images" / "lounge.jpg"
    loaded = LiveSource(processor, 10**9).load(SampleImage("key", (1, 2, 2), ImageRef(file.name, file)))
    assert isinstance(loaded, DecodedImage)
    handed = pickle.loads(pickle.dumps(loaded))
    with Image.open(file) as expected:
        assert np.array_equal(handed.pixels.permute(1, 2, 0).numpy(), np.asarray(expected))
        assert tuple(handed.image_grid_thw.tolist()) == processor.grid_of(expected.height, expected.width)
    assert handed.processor == processor
    assert hash(handed.processor) == hash(processor)
    assert handed.where == file.name


def test_processors_that_resize_otherwise_are_not_equal(tiny: Path) -> None:
    one, other = (ImageProcessor(AutoImageProcessor.from_pretrained(tiny, backend="pil")) for _ in range(2))
    assert one == other
    assert one != ImageProcessor(AutoImageProcessor.from_pretrained(tiny, backend="pil"), "cuda")
    other.max_pixels += 1
    assert one != other


@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait_for_the_gpu(tiny: Path, data_dir: Path) -> None:
    processor = ImageProcessor(AutoImageProcessor.from_pretrained(tiny, backend="torchvision"), "cuda")
    file = data_dir / "images" / "lounge.jpg"
    loaded = LiveSource(processor, 10**9).load(SampleImage("key", (1, 2, 2), ImageRef(file.name, file)))
    assert isinstance(loaded, DecodedImage)
    loaded.pin_memory().on(torch.device("cuda"))
    handed = [pickle.loads(pickle.dumps(loaded)).pin_memory() for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for image in handed:
            image.on(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class _Loaded(Dataset[StepImage]):
    """What a worker makes of images."""

    source: FeatureSource
    images: list[SampleImage]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> StepImage:
        return self.source.load(self.images[index])


@NEEDS_GPU
def test_live_features_are_those_of_the_cache(on_gpu: PipelineConfig, data_dir: Path) -> None:
    job = job_of(on_gpu)
    cache, live = Inputs.open(job).cache, Inputs.open(replace(job, from_cache=False)).source
    assert cache is not None
    keys = {image_key(file.read_bytes()): file for file in (data_dir / "images").iterdir()}
    images = [SampleImage(key, (1, 2, 2), ImageRef(keys[key].name, keys[key])) for key in cache.keys()]  # noqa: SIM118
    tower = load_tower(job, torch.device("cuda"))
    loader = DataLoader(_Loaded(live, images), batch_size=None, num_workers=1, pin_memory=True)
    for image, loaded in zip(images, loader, strict=True):
        (found,) = features_on(tower.device, [loaded], tower)
        cached = cache.read(image.key)
        assert torch.equal(cached.image_embeds, found.image_embeds.cpu()), image.ref.path
        assert torch.equal(cached.deepstack_features, found.deepstack_features.cpu()), image.ref.path
        assert torch.equal(cached.image_grid_thw, found.image_grid_thw), image.ref.path


@NEEDS_GPU
def test_verifying_against_the_tower_resizes_on_the_gpu(on_gpu: PipelineConfig) -> None:
    compared = compare_with_live(job_of(on_gpu), "train", 4, 0, Silent())
    assert [level.worst for level in compared.levels] == [0.0] * len(compared.levels)
