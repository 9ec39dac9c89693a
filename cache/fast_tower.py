"""The vision tower's speed on a GPU: the same products in fewer, larger steps. Last bits differ from the stock tower's.

Measured in docs/benchmarks/tower.md. Nothing here touches the tower's weights or what it computes in exact arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from cache.flash import flash_attention

# The library's product with a fused bias is a third faster than the one that inductor takes unasked.
COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "max_autotune_gemm": True,
    "max_autotune_gemm_backends": "ATEN",
}
_TANH_GELU = "gelu_pytorch_tanh"
_KEPT = 32  # tables of so many shapes
_NOT_COMPILED = 8  # so many new shapes
_Key = tuple[tuple[int, int, int], int]  # a grid, and how many images have it


class TowerOutput(NamedTuple):
    """Fields as in transformers' output: (N, D), and (N, D) for each DeepStack level."""

    pooler_output: torch.Tensor
    deepstack_features: list[torch.Tensor]


class Norm(NamedTuple):
    """Weights of a layer normalisation."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return layer_norm(states, self.weight.shape, self.weight, self.bias, self.eps)


class Shapes(NamedTuple):
    """Sizes that the compiled code may take for constants."""

    heads: int
    patches: int


class _Steps(NamedTuple):
    """What is compiled."""

    block: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    deepstack: list[Callable[[torch.Tensor], torch.Tensor]]
    merge: Callable[[Any, torch.Tensor], torch.Tensor]

    def compiled(self) -> _Steps:
        return _Steps(
            torch.compile(self.block, options=COMPILE_OPTIONS, fullgraph=True),
            [torch.compile(merger, options=COMPILE_OPTIONS) for merger in self.deepstack],
            torch.compile(self.merge, options=COMPILE_OPTIONS),
        )


class FastTower:
    """Runs a stock vision model on images of one shape.

    A block is compiled together with the normalisation of the block behind it, so that the sum of the residual is not
    read once more; all blocks share the compiled code. The patch embedding is one product (the Conv3d of the stock
    module is slow in bfloat16, https://github.com/pytorch/pytorch/issues/166122). What depends on the images' shape
    alone is made once. Nothing waits for the device.

    Args:
        module: the stock model, on its device.
        flash: attention by FlashAttention-4 (cache.flash), else by cuDNN.
        fused_gelu: the activation is computed within the product before it, where the library can.
        compile_first: False runs a batch of new shape or number the first time without compiling, which takes a
            quarter longer and spares seconds for the odd batch at the end. True where the same image must always give
            the same bits: both ways differ in the last ones.
    """

    def __init__(
        self, module: Any, *, flash: bool = False, fused_gelu: bool = True, compile_first: bool = True
    ) -> None:
        self._module = module
        self._patch_weight = module.patch_embed.proj.weight.flatten(1)
        self._patch_bias = module.patch_embed.proj.bias
        attention = module.blocks[0].attn
        self._heads = int(attention.num_heads)
        tanh = module.config.hidden_act == _TANH_GELU
        activate = _fused_gelu_product if tanh and fused_gelu else _product_then(module.blocks[0].mlp.act_fn)
        self._weights = [_block_weights(block) for block in module.blocks]
        norms = [_norm(block.norm1) for block in module.blocks]
        self._norms = [*norms, _norm(module.merger.norm)]
        self._plain = _Steps(
            _block_function(activate, flash_attention if flash else _library_attention),
            list(module.deepstack_merger_list),
            _after_norm,
        )
        self._compiled = self._plain.compiled()
        self._compile_first = compile_first
        self._seen: set[_Key] = set()
        self._tables: dict[_Key, tuple[torch.Tensor, ...]] = {}

    def __call__(self, pixels: torch.Tensor, grids: Sequence[tuple[int, int, int]], positions: Any) -> TowerOutput:
        """Run the tower.

        Args:
            pixels: (images * P, C * T * patch * patch) in the tower's dtype, images of one shape.
            grids: of each image.
            positions: see cache.positions.Positions.of.
        """
        module = self._module
        added, cos, sin = self._table(grids, positions)
        shapes = Shapes(self._heads, math.prod(grids[0]))
        steps = self._steps((grids[0], len(grids)))
        hidden = linear(pixels, self._patch_weight, self._patch_bias) + added
        normed = self._norms[0](hidden)
        levels = []
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):  # cuDNN is the fastest at 72 a head
            for number, weights in enumerate(self._weights):
                hidden, normed = steps.block(hidden, normed, cos, sin, weights, self._norms[number + 1], shapes)
                if number in module.deepstack_visual_indexes:
                    levels.append(steps.deepstack[module.deepstack_visual_indexes.index(number)](hidden))
            return TowerOutput(steps.merge(module.merger, normed), levels)

    def _steps(self, key: _Key) -> _Steps:
        new = key not in self._seen
        self._seen.add(key)
        # Where shapes hardly come again, the code that was compiled for some of them takes any.
        return self._plain if new and not self._compile_first and len(self._seen) <= _NOT_COMPILED else self._compiled

    def _table(self, grids: Sequence[tuple[int, int, int]], positions: Any) -> tuple[torch.Tensor, ...]:
        """Position embeddings (patches, width) and the rotation's cos and sin (patches, 1, head_dim) in fp32."""
        key = grids[0], len(grids)
        if key not in self._tables:
            if len(self._tables) >= _KEPT:
                self._tables.pop(next(iter(self._tables)))
            module, weights = self._module, positions["interp_weights"]
            added = (module.pos_embed(positions["interp_indices"]) * weights[:, :, None]).sum(1)
            cos, sin = module.rotary_pos_emb(added, positions["position_ids"])
            self._tables[key] = added.to(self._patch_weight.dtype), cos[:, None].float(), sin[:, None].float()
        return self._tables[key]


class _BlockWeights(NamedTuple):
    qkv: tuple[torch.Tensor, torch.Tensor]
    proj: tuple[torch.Tensor, torch.Tensor]
    fc1: tuple[torch.Tensor, torch.Tensor]
    fc2: tuple[torch.Tensor, torch.Tensor]
    norm2: Norm


def _block_weights(block: Any) -> _BlockWeights:
    def of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.weight, layer.bias

    attention, mlp = block.attn, block.mlp
    return _BlockWeights(
        of(attention.qkv), of(attention.proj), of(mlp.linear_fc1), of(mlp.linear_fc2), _norm(block.norm2)
    )


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.bias, float(norm.eps))


_Product = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
_Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _block_function(activated: _Product, attend: _Attention) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def block(
        hidden: torch.Tensor,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        weights: _BlockWeights,
        following: Norm,
        shapes: Shapes,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A block without its first normalisation, and the first normalisation of what follows it."""
        count, width = hidden.shape
        query, key, value = linear(normed, *weights.qkv).view(count, 3, shapes.heads, -1).unbind(1)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)

        def by_image(states: torch.Tensor) -> torch.Tensor:
            return states.view(-1, shapes.patches, shapes.heads, states.shape[-1])

        attended = attend(by_image(query), by_image(key), by_image(value))
        hidden = hidden + linear(attended.reshape(count, width), *weights.proj)
        hidden = hidden + linear(activated(weights.norm2(hidden), weights.fc1), *weights.fc2)
        return hidden, following(hidden)

    return block


def _library_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(images, patches, heads, head_dim) each, and so is the result."""
    return scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(
        1, 2
    )


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in fp32. Source: transformers, apply_rotary_pos_emb_vision."""
    wide = states.float()
    one, two = wide.chunk(2, -1)
    return (wide * cos + torch.cat((-two, one), -1) * sin).to(states.dtype)


def _after_norm(merger: Any, normed: torch.Tensor) -> torch.Tensor:
    """The main merger behind its normalisation."""
    merged: torch.Tensor = merger.linear_fc2(merger.act_fn(merger.linear_fc1(normed.view(-1, merger.hidden_size))))
    return merged


def _product_then(activation: Any) -> _Product:
    def product(states: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        activated: torch.Tensor = activation(linear(states, *weights))
        return activated

    return product


def _fused_gelu_product(states: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    fused: torch.Tensor = _linear_gelu(states, *weights)
    return fused


# An operator of its own, because inductor would take the library's call apart again.
@torch.library.custom_op("vision_once::linear_gelu", mutates_args=())
def _linear_gelu(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu(states @ weight.T + bias), in its approximation by tanh."""
    if not states.is_cuda:  # there the library's call takes the exact gelu
        return gelu(linear(states, weight, bias), approximate="tanh")
    return torch._addmm_activation(bias, states, weight.t(), use_gelu=True)


@_linear_gelu.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    del bias
    return states.new_empty(states.shape[0], weight.shape[0])
