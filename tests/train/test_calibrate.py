"""Which row length is chosen, from trials whose outcome is given; the trials themselves need a GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.build import CacheBuilder
from cache.content import rows_digest
from cache.errors import ResourceError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train import calibrate, run
from train.calibrate import (
    CALIBRATION_FILE,
    SHORTEST,
    Attempts,
    Trial,
    Try,
    choose,
    describe,
    lengths,
    longest_rows,
    read_calibration,
    write_calibration,
)
from train.config import TrainConfig
from train.step import Step
from train.step_dataset import CutStep

from .conftest import job_of


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
    as_they_are = [2048, 3072, 4608, 6912, 10368]  # up to the first that does not fit
    assert tried == [*((tokens, False) for tokens in as_they_are), (40_000, True)]  # the whole step


def test_recomputing_is_tried_from_the_longest_row_on_until_one_fits() -> None:
    tried: list[tuple[int, bool]] = []

    trials = choose(40_000, 1500, None, _device(5000, tried))

    assert [tokens for tokens, recompute in tried if recompute] == [40_000, 34_992, 23_328, 15_552]
    assert math.isfinite(next(t.seconds for t in trials if t.tokens_per_pack == 15_552))


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


class _Layers(torch.nn.Module):
    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict[str, bool]) -> None:
        """As a transformers model."""

    def activation_checkpointing_disable(self) -> None:
        """As a transformers model."""


def test_the_first_trial_does_not_count_what_loading_the_model_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is played: its peak stands where loading left it until somebody resets it."""
    peak = [10**9]
    step = _step(2048)
    monkeypatch.setattr(Step, "pin_memory", lambda self: self)
    played = {
        "max_memory_allocated": lambda _: peak[0],
        "reset_peak_memory_stats": lambda _: peak.__setitem__(0, 1000),
        "get_device_properties": lambda _: SimpleNamespace(total_memory=2000),
        "get_per_process_memory_fraction": lambda _: 1.0,
        "empty_cache": lambda: None,
        "memory_stats": lambda _: {},
    }
    for name, play in played.items():
        monkeypatch.setattr(torch.cuda, name, play)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: contextlib.nullcontext())
    monkeypatch.setattr(Attempts, "_run", lambda *_: 0.5)
    monkeypatch.setattr(Attempts, "_moments", lambda _: None)
    monkeypatch.setattr(calibrate, "Feeder", lambda *_: None)
    steps: Any = lambda _: _Steps(step)  # noqa: E731
    device = torch.device("cuda")
    attempts = Attempts(_Layers(), steps, (0, 0), device=device, autocast=contextlib.nullcontext)

    assert attempts(2048, False) == Trial(2048, False, 0.5, 1000)


class _Gpu:
    """One that is played: computing a row takes as long as it has tokens, and some memory.

    Attributes:
        ran: the rows' lengths.
        retries: how often memory had to be asked for anew, behind each row.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, retries: Sequence[int] = ()) -> None:
        self.ran: list[int] = []
        self._retries = [0, *retries]
        monkeypatch.setattr(calibrate, "pack_loss", self._loss)
        monkeypatch.setattr(calibrate.time, "perf_counter", lambda: float(sum(self.ran)))
        monkeypatch.setattr("train.on_device.features_on", lambda _device, images, _tower: images)
        played = {
            "synchronize": lambda _: None,
            "max_memory_allocated": lambda _: 500,
            "get_device_properties": lambda _: SimpleNamespace(total_memory=2000),
            "get_per_process_memory_fraction": lambda _: 1.0,
            "memory_stats": lambda _: {"num_alloc_retries": self._retries[min(len(self.ran), len(self._retries) - 1)]},
        }
        for name, play in played.items():
            monkeypatch.setattr(torch.cuda, name, play)

    def _loss(self, _model: Any, pack: Any, _features: Any, **_: Any) -> torch.Tensor:
        self.ran.append(pack.input_ids.shape[1])
        return torch.zeros((), requires_grad=True)

    def try_out(self, steps: Any) -> Trial:
        device = torch.device("cpu")
        attempts = Attempts(_Layers(), lambda _: steps, (0, 0), device=device, autocast=contextlib.nullcontext)
        return attempts(400, False)


def test_a_trial_runs_the_two_longest_rows_and_answers_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch)
    steps = _Steps(_step(100, 300, 200, 400))

    assert gpu.try_out(steps) == Trial(400, False, pytest.approx(1000), 500)
    assert gpu.ran == [400, 300] * 2
    assert steps.images == ["d", "b"], "those of the other rows are not read"


@pytest.mark.parametrize(("retries", "fits"), [([3, 9, 9, 9], True), ([0, 0, 0, 1], False)])
def test_what_asks_for_memory_anew_once_it_has_run_does_not_fit(
    retries: list[int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its first run memory finds its form."""
    trial = _Gpu(monkeypatch, retries).try_out(_Steps(_step(300, 400)))

    assert math.isfinite(trial.seconds) == fits


@dataclass(frozen=True)
class _Row:
    """As much of a Pack as a trial looks at."""

    input_ids: torch.Tensor
    images: tuple[int, ...]

    def map_tensors(self, *_: Any, **__: Any) -> _Row:
        """It is where it has to be."""
        return self


def _step(*lengths: int, places: Sequence[tuple[int, ...]] | None = None) -> CutStep:
    """Rows of so many tokens; the images at their places are letters."""
    places = [(row,) for row in range(len(lengths))] if places is None else places
    packs: Any = tuple(_Row(torch.zeros((1, n)), row) for n, row in zip(lengths, places, strict=True))
    images: Any = tuple("abcdef"[: 1 + max(place for row in places for place in row)])
    return CutStep(packs, images, 1.0, len(packs), 0)


class _Steps:
    """As much of a StepDataset as a trial looks at. Images that are read are there as they are; `read` names them."""

    def __init__(self, step: CutStep) -> None:
        self._step = step
        self.images: list[Any] = []

    def cut(self, index: tuple[int, int]) -> CutStep:
        assert index == (0, 0)
        return self._step

    def read(self, step: CutStep) -> Step:
        self.images += step.images
        images: Any = step.images
        return Step(step.packs, images, step.total_weight, step.num_samples, step.num_image_tokens)


def test_the_longest_rows_keep_their_images() -> None:
    """An image that stands in both is there once; one that stands in neither is not there."""
    step, share = longest_rows(_step(300, 100, 400, places=[(2, 0, 2), (3,), (0, 1)]))

    assert share == 7 / 8
    assert [p.input_ids.shape[1] for p in step.packs] == [400, 300]
    assert ["".join(step.images[place] for place in p.images) for p in step.packs] == ["ab", "cac"]  # type: ignore[misc]
    assert len(step.images) == 3


class _AskedError(Exception):
    """Ends a run where it would calibrate."""


def test_other_rows_are_other_circumstances(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones, added before the first checkpoint, may not fit what was chosen for those of before."""

    def settle(config: TrainConfig, model: Any, steps: Any, folder: Path, settings: dict[str, Any], **_: Any) -> None:
        raise _AskedError(settings["rows"])

    monkeypatch.setattr(run, "with_rows_that_fit", settle)
    found = []
    for name in ("train", "val"):
        splits = {"train": str(data_dir / f"{name}.jsonl")}
        config = make_config(splits, output_dir=str(tmp_path / name), cache={"dir": str(tmp_path / "features")})
        CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
        with pytest.raises(_AskedError) as asked:
            run.run_training(job_of(config), Silent())
        found.append(str(asked.value))
        assert found[-1] == rows_digest(config.data, "train")
    assert found[0] != found[1]


def test_a_trial_reads_as_a_line() -> None:
    assert describe(Trial(2048, True, 1.5, 3 << 30)) == (
        "rows of 2048 tokens with activation checkpointing: 1.500 s a step, 3.0 GiB"
    )
    assert describe(Trial(2048, False, math.inf, 0)).endswith("does not fit")
