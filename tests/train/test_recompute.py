"""Activation checkpointing within what is compiled, by the compiler of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from train.recompute import recomputing

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # the compiler's own doing
]


class Layer(torch.nn.Module):
    """Contains its checkpointing, as a layer of transformers does."""

    recompute = False

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4096))
        self.dropout = torch.nn.Dropout(dropout)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: dict[str, Any]) -> None:
        """As a transformers model."""
        self.recompute = True

    def activation_checkpointing_disable(self) -> None:
        """As a transformers model."""
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is dropped is needed in the backward pass, too."""
        work: Callable[..., torch.Tensor] = self._work
        if self.recompute:
            recomputed: torch.Tensor = checkpoint(work, x, use_reentrant=False)
            return recomputed
        return work(x)

    def _work(self, x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = self.dropout(x * self.weight)
        return kept.tanh() + kept


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch._functorch.config.activation_memory_budget = 1.0
    torch.compiler.reset()


def test_what_dropout_drops_is_the_same_when_it_is_computed_again() -> None:
    layer = Layer(0.5)
    layer.compile()
    recomputing(layer, True)
    for _ in range(2):
        layer.weight.grad = None
        output = layer(torch.rand(4096) + 0.5)
        output.sum().backward()
        assert layer.weight.grad is not None
        assert 0.4 < float((output != 0).float().mean()) < 0.6
        assert torch.equal(output != 0, layer.weight.grad != 0)


@pytest.mark.parametrize(
    ("wanted", "compiled", "dropout", "budget"),
    [(True, True, 0.0, 0.0), (True, True, 0.1, 1.0), (True, False, 0.0, 1.0), (False, True, 0.0, 1.0)],
)
def test_the_compiler_may_keep_nothing_unless_something_is_drawn(
    wanted: bool, compiled: bool, dropout: float, budget: float
) -> None:
    torch._functorch.config.activation_memory_budget = 0.5
    layer = Layer(dropout)
    if compiled:
        layer.compile()

    recomputing(layer, wanted)

    assert torch._functorch.config.activation_memory_budget == budget


def test_checkpointing_around_a_compiled_layer_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers before 5.23: the compiler would compute again what is computed again already."""
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", torch.nn.Module.__call__, raising=False)
    layer = Layer(0.0)
    layer.compile()

    recomputing(layer, True)

    assert torch._functorch.config.activation_memory_budget == 1.0
