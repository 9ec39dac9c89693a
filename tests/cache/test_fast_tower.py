"""The fast tower computes what the stock one does; compilation, which needs a GPU to pay, is left out here."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cache.vision_tower import VisionTower

CONFIG = Qwen3VLVisionConfig(
    depth=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    out_hidden_size=32,
    deepstack_visual_indexes=[0, 1],
    num_position_embeddings=64,
    patch_size=16,
)


def _module() -> Qwen3VLVisionModel:
    torch.manual_seed(0)
    return Qwen3VLVisionModel._from_config(CONFIG, dtype=torch.float32, attn_implementation="sdpa")


@pytest.mark.parametrize("count", [1, 3])
def test_fast_equals_stock_up_to_rounding(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiled.append(module))
    pixels = [torch.randn(24, 1536, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    grids = [torch.tensor([1, 4, 6])] * count
    stock = VisionTower(_module()).encode(pixels, grids)
    fast = VisionTower(_module(), fast=True).encode(pixels, grids)
    assert len(compiled) == 3 + 1 + 2  # blocks, merger, DeepStack mergers
    for ours, wanted in zip(fast, stock, strict=True):
        torch.testing.assert_close(ours.image_embeds, wanted.image_embeds, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.deepstack_features, wanted.deepstack_features, rtol=1e-4, atol=1e-5)
