"""Steps from data-loader workers arrive whole, in few pieces of shared memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cache.features import VisionFeatures
from cache.records import ImageRef
from train.chat import EncodedText
from train.features import CachedImage, FeatureSource, StepImage
from train.handing_over import Bundle, shared_bytes
from train.pack import Pack
from train.sample import SampleImage, make_sample
from train.shared_memory import OPEN_FILES
from train.step import Step
from train.step_dataset import StepDataset
from train.step_loader import make_loader

IMAGE_TOKEN, MERGE, GRID, WIDTH, LEVELS = 1, 2, (1, 4, 4), 8, 3
IMAGES = 30


class _Shared(FeatureSource):
    """Features that lie in one piece of shared memory an image, as those of the cache do in a worker."""

    bytes_per_token = (1 + LEVELS) * WIDTH * 2

    def load(self, image: SampleImage) -> StepImage:
        tokens = GRID[1] * GRID[2] // MERGE**2
        numbers = shared_bytes(tokens * self.bytes_per_token).view(torch.bfloat16).view(1 + LEVELS, tokens, WIDTH)
        numbers.copy_(torch.randn(numbers.shape, generator=torch.Generator().manual_seed(int(image.key))))
        return CachedImage(VisionFeatures(numbers[0], numbers[1:], torch.tensor(GRID)), torch.bfloat16)


def _steps(*, blocks: bool) -> StepDataset:
    samples = []
    for number in range(IMAGES):
        image = SampleImage(f"{number}", GRID, ImageRef(f"{number}"))
        ids = np.concatenate([[IMAGE_TOKEN], np.arange(5, 60)]).astype(np.int32)
        weights = np.concatenate([np.zeros(2), np.ones(len(ids) - 2)]).astype(np.float32)
        samples.append(make_sample(EncodedText(ids, weights, ()), (image,), merge_size=MERGE, source="drawn"))
    return StepDataset(
        samples,
        _Shared(),
        effective_batch_size=IMAGES,
        tokens_per_pack=128,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
        blocks=blocks,
    )


def _tensors(step: Step) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    for pack in step.packs:
        values = [getattr(pack, name) for name in Pack.__dataclass_fields__]
        if pack.blocks is not None:
            values += [getattr(pack.blocks, name) for name in type(pack.blocks).__dataclass_fields__]
        found += [value for value in values if isinstance(value, torch.Tensor)]
    for image in step.images:
        assert isinstance(image, CachedImage)
        found.extend(image.features.tensors().values())
    return found


@pytest.mark.parametrize("blocks", [True, False])
def test_a_step_is_what_the_worker_made(blocks: bool) -> None:
    steps = _steps(blocks=blocks)
    made = steps[0, 0]
    (arrived,) = make_loader(steps, num_workers=1, pin_memory=False, prefetch_factor=1, persistent_workers=False)

    assert len(arrived.packs) == len(made.packs) > 5
    assert [pack.images for pack in arrived.packs] == [pack.images for pack in made.packs]
    assert (arrived.total_weight, arrived.num_samples) == (made.total_weight, made.num_samples)
    for ours, theirs in zip(_tensors(arrived), _tensors(made), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts open files as Linux shows them")
def test_an_image_is_one_open_file_and_all_else_one_more() -> None:
    loader = make_loader(
        _steps(blocks=True), num_workers=1, pin_memory=False, prefetch_factor=1, persistent_workers=False
    )
    before = _shared_files()
    batches = iter(loader)
    step = next(batches)

    assert len(step.images) == IMAGES
    assert _shared_files() - before == IMAGES + 1
    del step
    assert _shared_files() == before
    assert next(batches, None) is None


def _shared_files() -> int:
    """Files of shared memory that this process has open."""
    return sum("torch_" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_tensors_of_every_kind_come_back() -> None:
    piece = shared_bytes(64).view(torch.float32)
    piece.copy_(torch.arange(16))
    content = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "odd": torch.tensor([True, False, True]),
        "strided": torch.arange(12).view(3, 4).t(),
        "shared": piece.view(4, 4)[1:],
        "shared too": piece[:3],
        "shared, strided": piece.view(4, 4).t(),
        "words": ("a", 1, None),
    }

    bundle = Bundle.of(content)
    found = bundle.content()

    assert len(bundle.pieces) == 2
    assert found.pop("words") == content.pop("words")
    for name, tensor in content.items():
        assert isinstance(tensor, torch.Tensor)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    piece[5] = -1
    assert found["shared"][0, 1] == -1, "what lay in shared memory stays where it lies"


@pytest.fixture
def limit() -> Iterator[int]:
    """A low limit of open files; what may be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, most), hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_and_training_may_open_as_many_files_as_the_host_allows(limit: int) -> None:
    make_loader(_steps(blocks=False), num_workers=0, pin_memory=False, prefetch_factor=1, persistent_workers=False)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(512, limit)

    make_loader(_steps(blocks=False), num_workers=1, pin_memory=False, prefetch_factor=1, persistent_workers=False)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit
