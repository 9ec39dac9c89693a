"""The orders of samples that steps are cut from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from train.chat import EncodedText
from train.order import Order, epoch_order
from train.sample import Sample

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


def test_training_in_the_files_order_does_not_depend_on_the_seed_of_the_order(run_cached: Callable[..., Run]) -> None:
    settings = {"effective_batch_size": 5, "max_steps": 1, "order": "file"}
    plain, shuffled = (run_cached(order, **{**settings, "order": order}).losses()[1] for order in ("file", "sample"))

    # Fresh adapters change nothing yet, so the first loss is that of the first five rows, whatever the seed.
    assert run_cached("other seed", **settings, seed=7).losses()[1] == plain
    assert shuffled != plain
