"""A process's share of a step: rows in whole blocks, and equally many of them where the base is divided."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches

from cache.records import ImageRef
from tests.owned import Owned
from train.chat import EncodedText
from train.features import FeatureSource, PixelImage, StepImage
from train.pack_mask import BLOCK_SIZE
from train.sample import Sample, SampleImage, make_sample
from train.step import Step
from train.step_dataset import StepDataset
from train.step_loader import OneAhead, make_loader

IMAGE_TOKEN, MERGE = 1, 2


class _NoFeatures(FeatureSource):
    bytes_per_token = 0

    def load(self, image: SampleImage) -> StepImage:
        return PixelImage(torch.empty(0), torch.tensor(image.grid))


def _samples(count: int) -> list[Sample]:
    """Questions of very different lengths, four on each image."""
    dice = np.random.default_rng(0)
    samples = []
    for number in range(count):
        image = SampleImage(f"{number // 4}", (1, 4, 4), ImageRef(f"{number // 4}"))
        words = dice.integers(5, 200, 3 + 40 * (number % 5))
        ids = np.concatenate([[IMAGE_TOKEN], words]).astype(np.int32)
        weights = np.concatenate([np.zeros(2), np.ones(len(ids) - 2)]).astype(np.float32)
        samples.append(make_sample(EncodedText(ids, weights, ()), (image,), merge_size=MERGE, source="drawn"))
    return samples


def _shares(samples: list[Sample], number: int, budget: int, *, equal: bool) -> list[Step]:
    def share(rank: int) -> Step:
        dataset = StepDataset(
            samples,
            _NoFeatures(),
            effective_batch_size=10,
            tokens_per_pack=budget,
            image_token_id=IMAGE_TOKEN,
            merge_size=MERGE,
            seed=1,
            equal_packs=equal,
            rank=rank,
            world_size=4,
        )
        return dataset[0, number]

    return [share(rank) for rank in range(4)]


@pytest.mark.parametrize("budget", [1, 100, 300, 10**6])
def test_processes_go_through_the_layers_equally_often(budget: int) -> None:
    samples = _samples(21)  # the last step holds one sample
    for number in range(3):
        equal, plain = (_shares(samples, number, budget, equal=equal) for equal in (True, False))
        assert len({len(step.packs) for step in equal}) == 1
        weights = [
            sum(float(pack.target_weights.sum()) for step in steps for pack in step.packs) for steps in (equal, plain)
        ]
        assert weights[0] == weights[1] == equal[0].total_weight
        assert all(pack.target_weights.numel() for step in equal for pack in step.packs)
        for ours, theirs in zip(equal, plain, strict=True):  # company comes behind the work
            for pack, wanted in zip(ours.packs, theirs.packs, strict=False):
                assert torch.equal(pack.input_ids, wanted.input_ids) or not wanted.target_weights.any()
                assert all(place < len(ours.images) for place in pack.images)
    if budget == 1:
        assert len({len(step.packs) for step in _shares(samples, 0, budget, equal=False)}) > 1


def test_rows_for_a_gpu_take_two_blocks_at_least_and_filling_sees_nothing() -> None:
    dataset = StepDataset(
        _samples(8),
        _NoFeatures(),
        effective_batch_size=8,
        tokens_per_pack=200,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
        blocks=True,
    )
    packs = dataset[0, 0].packs
    lengths = [pack.input_ids.shape[1] for pack in packs]
    assert min(lengths) == 2 * BLOCK_SIZE
    assert all(length % BLOCK_SIZE == 0 for length in lengths)
    for pack in packs:
        index = torch.arange(len(pack.visible_until))
        filling = (pack.visible_until == index + 1) & (pack.position_ids[1:, 0].sum(0) == 0)
        start = int(filling.nonzero()[0])
        assert bool(filling[start:].all())
        assert int(pack.visible_until[:start].max()) <= start
        assert int(pack.target_positions.max()) < start


def test_the_heaviest_step_is_the_one_with_most_to_compute() -> None:
    def sample(image: str, side: int, words: int) -> Sample:
        ids = np.concatenate([[IMAGE_TOKEN], np.full(words, 7)]).astype(np.int32)
        weights = np.concatenate([np.zeros(1), np.ones(words)]).astype(np.float32)
        shown = SampleImage(image, (1, side, side), ImageRef(image))
        return make_sample(EncodedText(ids, weights, ()), (shown,), merge_size=MERGE, source="drawn")

    # Four questions on one image of 900 tokens, then one on each of four with 400: the first hold more tokens each.
    samples = [sample("one", 60, 5 + n) for n in range(4)] + [sample(f"{n}", 40, 5) for n in range(4)]
    steps = StepDataset(
        samples,
        _NoFeatures(),
        effective_batch_size=4,
        tokens_per_pack=10**6,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
    )

    number, tokens = steps.heaviest_step(epoch=0)

    assert (number, tokens) == (1, 4 * 405)
    assert tokens == steps.tokens_in_step(0, 1) > steps.tokens_in_step(0, 0)


class _Large(_NoFeatures):
    bytes_per_token = 1 << 30


def test_the_largest_step_is_told_in_bytes_of_a_processs_share() -> None:
    steps = StepDataset(
        _samples(40),
        _Large(),
        effective_batch_size=8,  # two images of four tokens
        tokens_per_pack=512,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
        world_size=2,
    )
    assert steps.largest_step_bytes == 2 * 4 // 2 << 30


class _Collecting(_NoFeatures):
    def load(self, image: SampleImage) -> StepImage:
        gc.collect()
        return super().load(image)


@pytest.fixture
def without_collecting() -> Iterator[None]:
    """This process's garbage stays until it is asked for."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collecting")
def test_workers_of_a_resumed_epoch_leave_the_parents_garbage_alone(tmp_path: Path) -> None:
    """Trainer goes on in the middle of an epoch by a data loader of accelerate's, made after ours."""
    steps = StepDataset(
        _samples(12),
        _Collecting(),
        effective_batch_size=4,
        tokens_per_pack=512,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
    )
    loader = make_loader(steps, num_workers=2, pin_memory=False, prefetch_factor=2, persistent_workers=False)
    rest = skip_first_batches(loader, 1)
    Owned(tmp_path / "told")
    found = [step.num_samples for epoch in (rest, loader) for step in epoch]

    assert found == [4] * (2 + 3)
    assert not (tmp_path / "told").exists()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_one_ahead_gives_each_step_once_and_names_the_one_behind_it(
    num_workers: int, persistent: bool, count: int
) -> None:
    steps = StepDataset(
        _samples(4 * count - 2),
        _NoFeatures(),
        effective_batch_size=4,
        tokens_per_pack=512,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=1,
    )
    assert len(steps) == count
    loader = make_loader(
        steps, num_workers=num_workers, pin_memory=False, prefetch_factor=1, persistent_workers=persistent
    )
    ahead = OneAhead()
    for epoch in range(3):
        loader.set_epoch(epoch)
        iterator = iter(loader)
        promised: Step | None = None
        for number in range(len(steps)):
            step = ahead.take(iterator)
            assert step is not None
            assert torch.equal(step.packs[0].input_ids, steps[epoch, number].packs[0].input_ids)
            assert promised is None or step is promised
            promised = ahead.following
            assert (promised is not None) == (0 < number < count - 1)
