"""Images of any shapes through the fast tower: a few compiled graphs serve all, with the stock tower's numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cache.fast_tower import _KEPT, FastTower
from cache.vision_tower import VisionTower

from .test_fast_tower import CONFIG, _module


def graphs_of(shapes: int, most_at_once: int, monkeypatch: pytest.MonkeyPatch, *, flash: bool) -> int:
    """Run so many shapes, compare with the stock tower, and count the graphs. Traced, not compiled."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compile_as_it_is = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: compile_as_it_is(f, backend=backend, **more))
    dice = random.Random(4)
    module = _module()
    tower = VisionTower(module, fast=FastTower(module, flash=flash))
    stock = VisionTower(_module())
    kinds = [(1, 2 * h, 2 * w) for h in range(1, 9) for w in range(1, 9)]
    for grid in dice.sample(kinds, shapes):
        count = dice.randint(1, most_at_once)
        pixels = [torch.randn(grid[1] * grid[2], 1536) for _ in range(count)]
        ours = tower.encode(pixels, [torch.tensor(grid)] * count)
        theirs = stock.encode(pixels, [torch.tensor(grid)] * count)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.image_embeds, other.image_embeds, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(one.deepstack_features, other.deepstack_features, rtol=1e-3, atol=1e-4)
    return len(graphs)


# Block, DeepStack mergers and merger: for the first shape, for any, for one image or one token, and for both.
MOST_GRAPHS = 4 * (1 + len(CONFIG.deepstack_visual_indexes) + 1)


def test_many_shapes_share_a_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More shapes than tables are kept of, so that the first are given up."""
    assert graphs_of(_KEPT + 4, 3, monkeypatch, flash=False) <= MOST_GRAPHS


@pytest.mark.soak
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("most_at_once", [1, 5])
def test_very_many_shapes_share_a_few_graphs(flash: bool, most_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs_of(64, most_at_once, monkeypatch, flash=flash) <= MOST_GRAPHS
