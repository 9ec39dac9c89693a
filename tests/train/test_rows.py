"""Which settings a run gets: as given, as calibrated on a GPU that is played by a clock and a limit, as kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.errors import ConfigError
from train import rows
from train.calibrate import Attempts, Trial
from train.config import TrainConfig


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


def test_the_fastest_trial_is_taken_kept_and_the_model_left_as_it_wants(
    settle: Callable[..., tuple[TrainConfig, Layers]], tmp_path: Path
) -> None:
    config, model = settle(TrainConfig())
    again, _ = settle(TrainConfig())
    trials = json.loads((tmp_path / "calibration.json").read_text())["trials"]

    assert (config.tokens_per_pack, config.gradient_checkpointing) == (3072, False)
    assert {t["gradient_checkpointing"] for t in trials} == {False, True}
    assert model.recomputes is False  # though trials with checkpointing came last
    assert again == config


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
