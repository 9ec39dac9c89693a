"""The orders of samples that steps are cut from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cache.records import ImageRef
from train.chat import EncodedText
from train.order import Order, epoch_order
from train.sample import Sample, SampleImage
from train.step_dataset import StepDataset

from .conftest import Run


def _samples(count: int) -> list[Sample]:
    text = EncodedText(np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.float32), ())
    return [Sample(text, (), 1, 1.0, f"row {number}") for number in range(count)]


def test_file_takes_the_rows_as_they_stand_in_every_epoch() -> None:
    for seed, epoch in ((1, 0), (1, 1), (2, 5)):
        assert list(epoch_order(_samples(7), "file", seed=seed, epoch=epoch)) == list(range(7))


@pytest.mark.parametrize("order", ["sample", "image", "file"])
def test_every_order_visits_every_sample_once(order: Order) -> None:
    assert sorted(epoch_order(_samples(9), order, seed=3, epoch=2)) == list(range(9))


IMAGES = ["A", "B", "C", "A", "", "B", "AB", "A", "C", "A", "AB", "", "C", "C"]  # of each sample


def _about(images: Sequence[str]) -> list[Sample]:
    text = EncodedText(np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.float32), ())
    shown = [tuple(SampleImage(key, (1, 2, 2), ImageRef(key)) for key in keys) for keys in images]
    return [Sample(text, own, 1, 1.0, f"row {number}") for number, own in enumerate(shown)]


def _groups(order: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Images, and the samples that stand together."""
    return [(images, list(together)) for images, together in itertools.groupby(order, key=IMAGES.__getitem__)]


def test_samples_over_the_same_images_come_together_in_random_order() -> None:
    epochs = [epoch_order(_about(IMAGES), "image", seed=3, epoch=epoch).tolist() for epoch in range(20)]

    for order in epochs:
        assert sorted(order) == list(range(len(IMAGES)))
        # Texts without images have no reason to meet; (A) and (A, B) are groups of their own.
        assert sorted(images for images, _ in _groups(order) if images) == ["A", "AB", "B", "C"]
    assert len({tuple(images for images, _ in _groups(order)) for order in epochs}) > 10
    assert len({tuple(together) for order in epochs for images, together in _groups(order) if images == "A"}) > 5
    assert epochs[4] == epoch_order(_about(IMAGES), "image", seed=3, epoch=4).tolist()  # and nothing else decides


def test_steps_are_cut_at_exactly_their_size_also_inside_a_group() -> None:
    steps = StepDataset(
        _about(IMAGES),
        None,  # type: ignore[arg-type]  # nothing is read
        effective_batch_size=5,
        tokens_per_pack=100,
        image_token_id=0,
        merge_size=2,
        seed=3,
        order="image",
    )
    parted = []
    for epoch in range(10):
        cut = [steps.indices(epoch, step) for step in range(len(steps))]
        assert [len(step) for step in cut] == [5, 5, 4]
        order = epoch_order(_about(IMAGES), "image", seed=3, epoch=epoch).tolist()
        assert list(itertools.chain(*cut)) == order
        parted += [IMAGES[first[-1]] == IMAGES[second[0]] != "" for first, second in itertools.pairwise(cut)]
    assert any(parted)


def test_training_in_the_files_order_does_not_depend_on_the_seed_of_the_order(run_cached: Callable[..., Run]) -> None:
    settings = {"effective_batch_size": 5, "max_steps": 1, "order": "file"}
    plain, shuffled = (run_cached(order, **{**settings, "order": order}).losses()[1] for order in ("file", "sample"))

    # Fresh adapters change nothing yet, so the first loss is that of the first five rows, whatever the seed.
    assert run_cached("other seed", **settings, seed=7).losses()[1] == plain
    assert shuffled != plain
