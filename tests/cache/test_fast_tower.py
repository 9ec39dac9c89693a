"""The fast tower computes what the stock one does; compilation, which needs a GPU to pay, is left out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cache import flash as flash_extra
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError
from cache.fast_tower import FastTower
from cache.flash import flash_attention
from cache.positions import Positions
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


@flash_attention.register_kernel("cpu")
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What the library computes on a GPU."""
    by_head = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(*by_head).transpose(1, 2).contiguous()


def _module() -> Qwen3VLVisionModel:
    torch.manual_seed(0)
    return Qwen3VLVisionModel._from_config(CONFIG, dtype=torch.float32, attn_implementation="sdpa")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("fused_gelu", "flash"), [(True, False), (False, False), (True, True)])
def test_fast_equals_stock_up_to_rounding(
    count: int, fused_gelu: bool, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    pixels = [torch.randn(24, 1536, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    grids = [torch.tensor([1, 4, 6])] * count
    module = _module()
    fast = FastTower(module, flash=flash, fused_gelu=fused_gelu)
    shapes = tuple(tuple(grid.tolist()) for grid in grids)
    positions = Positions(module, torch.device("cpu")).of(shapes)
    with torch.no_grad():
        for _ in range(2):  # the second time with what was kept
            ours = fast(torch.cat(pixels), shapes, positions)
    stock = VisionTower(_module()).encode(pixels, grids)
    torch.testing.assert_close(ours.pooler_output, torch.cat([one.image_embeds for one in stock]), rtol=1e-4, atol=1e-5)
    levels = torch.cat([one.deepstack_features for one in stock], dim=1)
    torch.testing.assert_close(torch.stack(ours.deepstack_features), levels, rtol=1e-4, atol=1e-5)
    assert levels.std() > 0.01


def test_a_block_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for the compiler, which is not needed for it; twice, for another number of images.

    With the other attention, and for many shapes: test_fast_tower_shapes.py.
    """
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_as_it_is = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options=None, **more: compile_as_it_is(f, backend=backend, **more))
    module = _module()
    fast = FastTower(module, flash=True)
    with torch.no_grad():
        for count in (1, 2):
            pixels, grids = torch.randn(24 * count, 1536), ((1, 4, 6),) * count
            fast(pixels, grids, Positions(module, torch.device("cpu")).of(grids))
    assert len(graphs) <= 2 * (1 + 2 + 1), "blocks do not share their graph"  # block, DeepStack mergers, merger


def test_an_odd_batch_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_calls: list[int] = []

    def compile_nothing(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            compiled_calls.append(1)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compile_nothing)
    module = _module()
    tower = VisionTower(module, fast=FastTower(module, compile_first=False))
    used = []
    for count in (3, 3, 3, 1, *range(10, 20)):
        compiled_calls.clear()
        tower.encode([torch.randn(24, 1536)] * count, [torch.tensor([1, 4, 6])] * count)
        used.append(bool(compiled_calls))
    assert used == [False, True, True, False, *[False] * 6, *[True] * 4]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"tower": "fast", "attn_implementation": "eager"}, "attends by sdpa or flash_attention_4"),
        ({"attn_implementation": "flash_attention_4"}, "needs tower: fast"),
        ({"tower": "fast", "attn_implementation": "flash_attention_4", "dtype": "float32"}, "a dtype of 16 bits"),
    ],
)
def test_attention_must_fit_the_tower(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        CacheConfig(**settings)


@pytest.mark.parametrize(
    ("capability", "what"),
    [((8, 0), "needs a Hopper GPU .* an A100"), ((9, 0), "flash-attn-4 4.*, or use sdpa")],
)
def test_flash_says_what_it_lacks(capability: tuple[int, int], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(flash_extra, "_installed_version", lambda: None)
    cache = CacheConfig(tower="fast", attn_implementation="flash_attention_4", device="cuda:0")
    with pytest.raises(ConfigError, match=f"(?s){what}"):
        VisionTower.load(ModelConfig(name_or_path="nowhere"), cache)
