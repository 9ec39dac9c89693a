"""Which settings a run gets: as given, as calibrated on a GPU that is played by a clock and a limit, as kept."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cache.config import ModelConfig
from cache.errors import ConfigError
from train import rows
from train.calibrate import Attempts, Trial
from train.chat import EncodedText
from train.config import LoraConfig, TrainConfig
from train.features import FeatureSource, StepImage
from train.lora import add_lora
from train.model import autocast, load_language_model
from train.sample import SampleImage, make_sample
from train.step_dataset import StepDataset


class Layers(torch.nn.Module):
    """Knows whether activations are recomputed."""

    recomputes = False

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict[str, Any]) -> None:
        """As a transformers model."""
        self.recomputes = True

    def activation_checkpointing_disable(self) -> None:
        """As a transformers model."""
        self.recomputes = False


@pytest.fixture
def settle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[TrainConfig, Layers]]:
    """Decides where rows of up to 4000 tokens fit as they are, and checkpointing takes most of the time again."""

    def attempt(self: Attempts, tokens: int, recompute: bool) -> Trial:
        getattr(self._model, f"activation_checkpointing_{'enable' if recompute else 'disable'}")(
            *([{}] if recompute else [])
        )
        seconds = (1 + 2000 / tokens) * (1.8 if recompute else 1) if recompute or tokens <= 4000 else float("inf")
        return Trial(tokens, recompute, seconds, tokens)

    monkeypatch.setattr(Attempts, "__call__", attempt)
    properties = SimpleNamespace(total_memory=1 << 30, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
    steps: Any = SimpleNamespace(heaviest_step=lambda epoch: (3, 20_000), longest_sample=1500)

    def decide(config: TrainConfig, *, device: str = "cuda") -> tuple[TrainConfig, Layers]:
        model = Layers()
        decided = rows.with_rows_that_fit(
            config,
            model,
            lambda _: steps,
            tmp_path,
            {"seed": 1},
            device=torch.device(device),
            tower=None,
            world_size=1,
        )
        return decided, model

    return decide


def test_numbers_that_are_given_are_kept(settle: Callable[..., tuple[TrainConfig, Layers]], tmp_path: Path) -> None:
    config, _ = settle(TrainConfig(tokens_per_pack=777, gradient_checkpointing=True))

    assert (config.tokens_per_pack, config.gradient_checkpointing) == (777, True)
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_is_not_tried(settle: Callable[..., tuple[TrainConfig, Layers]]) -> None:
    config, _ = settle(TrainConfig(), device="cpu")

    assert (config.tokens_per_pack, config.gradient_checkpointing) == (8192, False)


def test_the_fastest_trial_is_taken_and_kept(settle: Callable[..., tuple[TrainConfig, Layers]], tmp_path: Path) -> None:
    config, _ = settle(TrainConfig())
    again, _ = settle(TrainConfig())
    trials = json.loads((tmp_path / "calibration.json").read_text())["trials"]

    assert (config.tokens_per_pack, config.gradient_checkpointing) == (3072, False)
    assert {t["gradient_checkpointing"] for t in trials} == {False, True}
    assert again == config


def test_the_choice_is_said_when_it_is_made_and_when_it_is_kept(
    settle: Callable[..., tuple[TrainConfig, Layers]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "train")
    for _ in range(2):
        settle(TrainConfig())

    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("calibrated:")]
    line = r"calibrated: rows of 3072 tokens without activation checkpointing: \d\.\d{3} s a step, \d\.\d GiB"
    assert len(said) == 2
    assert all(re.fullmatch(line, one) for one in said)


def test_other_kernels_are_tried_anew(
    settle: Callable[..., tuple[TrainConfig, Layers]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing an extra changes what `attention: auto` means."""
    noted = []
    for kind in ("flex", "flash"):
        monkeypatch.setattr(rows, "attention_kind", lambda *_, kind=kind: kind)
        settle(TrainConfig())
        noted.append(json.loads((tmp_path / "calibration.json").read_text())["made_for"]["attention"])
    assert noted == ["flex", "flash"]


def test_checkpointing_that_is_asked_for_is_the_only_way_tried(
    settle: Callable[..., tuple[TrainConfig, Layers]],
) -> None:
    config, model = settle(TrainConfig(gradient_checkpointing=True))

    assert (config.gradient_checkpointing, model.recomputes) == (True, True)
    assert config.tokens_per_pack == 20_000


def test_a_divided_model_needs_a_number(settle: Callable[..., tuple[TrainConfig, Layers]]) -> None:
    with pytest.raises(ConfigError, match=r"auto is not there with train\.fsdp"):
        settle(TrainConfig(fsdp="full_shard"))


class _NoImages(FeatureSource):
    bytes_per_token = 0

    def load(self, image: SampleImage) -> StepImage:
        """Never called."""
        raise AssertionError


def _texts(budget: int) -> StepDataset:
    """Steps of four short texts."""
    samples = []
    for number in range(4):
        text = EncodedText(np.arange(5, 25, dtype=np.int32) + number, np.ones(20, dtype=np.float32), ())
        samples.append(make_sample(text, (), merge_size=2, source="drawn"))
    return StepDataset(
        samples,
        _NoImages(),
        effective_batch_size=4,
        tokens_per_pack=budget,
        image_token_id=1,
        merge_size=2,
        seed=None,
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_trial_leaves_weights_and_random_numbers_as_they_were(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """Forward and backward are real; the GPU's clock and memory are played."""
    peak = 900
    for name, play in {
        "synchronize": lambda _: None,
        "max_memory_allocated": lambda _: peak,
        "get_device_properties": lambda _: SimpleNamespace(total_memory=10**9),
        "get_per_process_memory_fraction": lambda _: 1.0,
        "memory_stats": lambda _: {},
    }.items():
        monkeypatch.setattr(torch.cuda, name, play)
    device, config = torch.device("cpu"), TrainConfig(precision="fp32", lora=LoraConfig(r=4, lora_dropout=0.5))
    model = add_lora(load_language_model(ModelConfig(name_or_path=str(tiny)), config, device), config.lora, seed=1)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    drawn = torch.get_rng_state()
    attempts = Attempts(model, _texts, (0, 0), device=device, autocast=lambda: autocast(config, device))

    trial = attempts(40, recompute)
    peak = 10**9  # more than is left for a step
    beyond = attempts(80, recompute)

    assert (trial.tokens_per_pack, trial.gradient_checkpointing) == (40, recompute)
    assert 0 < trial.seconds < math.inf
    assert trial.peak_bytes == 900
    assert attempts._moments().nbytes == 8 * trained, "of that memory, some is the optimizer's"
    assert beyond.seconds == math.inf
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_trial_that_runs_out_of_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([torch.OutOfMemoryError("no"), RuntimeError("ALLOC_FAILED"), RuntimeError("something else")])

    def too_much(*_: Any, **__: Any) -> torch.Tensor:
        raise next(failures)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr("train.calibrate.pack_loss", too_much)
    attempts = Attempts(
        Layers(), _texts, (0, 0), device=torch.device("cpu"), autocast=lambda: torch.autocast("cpu", enabled=False)
    )

    assert attempts(40, False).seconds == math.inf
    assert attempts(40, False).seconds == math.inf
    with pytest.raises(RuntimeError, match="something else"):
        attempts(40, False)
