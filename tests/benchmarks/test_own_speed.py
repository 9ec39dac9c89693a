"""The training benchmark's own rows, really measured, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kept_rows import DOES_NOT_FIT, Row
from .own_speed import loop_row, packs_row
from .training_cases import CASES, prepare


@pytest.fixture(scope="module")
def config(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 questions on one image in a step, of rows that `auto` picks."""
    return prepare(tmp_path_factory.mktemp("work"), tiny, CASES["9 an image"].with_rows("auto"), tiny=True)


def test_packs_and_the_loop_over_them(config: Path) -> None:
    packs = packs_row(config, "packs", profile=True)
    assert packs.ms is not None
    details = packs.details
    assert details["samples"] == 6
    assert details["tokens_per_pack"] == 8192  # what auto is where there is no GPU
    assert details["longest_pack"] == 6 * details["tokens_per_sample"]
    assert sum(details["profile"]["shares"].values()) == pytest.approx(1)

    loop = loop_row(config, "loop", packs)
    assert loop.ms is not None
    assert loop.details["tokens_per_pack"] == 8192


def test_there_is_no_loop_over_packs_that_do_not_fit(config: Path) -> None:
    row = loop_row(config, "loop", Row("packs", "packs", None, DOES_NOT_FIT))
    assert (row.ms, row.reason) == (None, DOES_NOT_FIT)
