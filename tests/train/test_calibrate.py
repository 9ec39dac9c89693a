"""Which row length is chosen, from trials whose outcome is given; the trials themselves need a GPU."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import ResourceError
from train.calibrate import (
    CALIBRATION_FILE,
    SHORTEST,
    Trial,
    Try,
    choose,
    describe,
    lengths,
    read_calibration,
    write_calibration,
)


def _device(memory: int, tried: list[tuple[int, bool]]) -> Try:
    """A device that holds rows of so many tokens, four times as many with checkpointing, which takes a third longer."""

    def attempt(tokens: int, recompute: bool) -> Trial:
        tried.append((tokens, recompute))
        fits = tokens <= memory * (4 if recompute else 1)
        seconds = (1 + 1000 / tokens) * (4 / 3 if recompute else 1)
        return Trial(tokens, recompute, seconds if fits else math.inf, tokens)

    return attempt


def test_the_longest_row_that_fits_wins_when_longer_is_faster() -> None:
    tried: list[tuple[int, bool]] = []

    best = choose(40_000, 1500, None, _device(10_000, tried))[0]

    assert (best.tokens_per_pack, best.gradient_checkpointing) == (6912, False)
    assert [r for t, r in tried].count(False) == 5  # up to the first that does not fit
    assert max(t for t, r in tried if r) == 40_000  # the whole step


def test_checkpointing_is_taken_where_it_is_the_only_way_or_the_faster() -> None:
    assert choose(40_000, 5000, None, _device(4000, []))[0].gradient_checkpointing
    # Rows of one sample each cost more than computing twice.
    assert choose(100_000, 300, None, _device(2048, []))[0].gradient_checkpointing is False


def test_a_whole_step_in_one_row_needs_no_trial_with_checkpointing() -> None:
    tried: list[tuple[int, bool]] = []

    choose(3000, 500, None, _device(10**6, tried))

    assert tried == [(2048, False), (3000, False)]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_given_setting_is_kept(wanted: bool) -> None:
    tried: list[tuple[int, bool]] = []

    assert choose(3000, 500, wanted, _device(10**6, tried))[0].gradient_checkpointing is wanted
    assert {r for _, r in tried} == {wanted}


def test_when_nothing_fits_the_error_names_the_longest_sample() -> None:
    with pytest.raises(ResourceError, match=r"row of 9000 tokens, which the longest sample \(9000 tokens\)"):
        choose(40_000, 9000, None, _device(100, []))


@given(step=st.integers(1, 10**6), longest=st.integers(1, 10**5))
def test_lengths_begin_with_what_is_needed_and_end_with_a_whole_step(step: int, longest: int) -> None:
    tried = lengths(step, longest)

    assert tried[0] == max(SHORTEST, longest)
    assert all(a < b for a, b in itertools.pairwise(tried))
    assert tried[-1] == max(step, tried[0])
    assert all(tokens < step for tokens in tried[:-1])


def test_the_choice_is_kept_for_the_same_circumstances_only(tmp_path: Path) -> None:
    trials = choose(40_000, 1500, None, _device(10_000, []))
    write_calibration(tmp_path, {"device": "A", "seed": (1, 2)}, trials)

    assert read_calibration(tmp_path, {"device": "A", "seed": (1, 2)}) == trials[0]
    assert read_calibration(tmp_path, {"device": "B", "seed": (1, 2)}) is None
    assert read_calibration(tmp_path / "elsewhere", {}) is None
    content = json.loads((tmp_path / CALIBRATION_FILE).read_text())
    assert [t["seconds"] for t in content["trials"]].count(None) == 1
    (tmp_path / CALIBRATION_FILE).write_text("{")
    assert read_calibration(tmp_path, {"device": "A", "seed": (1, 2)}) is None


def test_a_trial_reads_as_a_line() -> None:
    assert describe(Trial(2048, True, 1.5, 3 << 30)) == (
        "rows of 2048 tokens with activation checkpointing: 1.500 s a step, 3.0 GiB"
    )
    assert describe(Trial(2048, False, math.inf, 0)).endswith("does not fit")
