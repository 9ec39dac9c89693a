"""The vision tower's speed on a GPU: the same products in fewer, larger steps. Last bits differ from the stock tower's.

Measured in docs/benchmarks/tower.md. Nothing here touches the tower's weights or what it computes in exact arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

# transformers hands the boundaries of images to an implementation whose name says flash, instead of cutting queries and
# keys at every block, which would read the boundaries back from the device each time and break the compiled graph.
NAME = "flash_same_shape"


class LinearPatchEmbed(torch.nn.Module):
    """The patch embedding as the one matrix product that a convolution with stride = kernel is.

    The Conv3d of the stock module is slow in bfloat16 (https://github.com/pytorch/pytorch/issues/166122).
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        projection = stock.proj
        self.weight = torch.nn.Parameter(projection.weight.flatten(1), requires_grad=False)
        self.bias = projection.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(P, C * T * patch * patch) -> (P, width)."""
        return linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)


def speed_up(module: Any) -> None:
    """Make a stock vision model fast, in place. Batches must then hold images of one shape only."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, same_shape_attention)
    module.patch_embed = LinearPatchEmbed(module.patch_embed)
    module.config._attn_implementation = NAME
    # The library's product with a fused bias is a third faster than the one that inductor takes unasked.
    options: dict[str, str | int | bool] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
    for part in (*module.blocks, module.merger, *module.deepstack_merger_list):
        if isinstance(part, torch.nn.Module):
            part.compile(options=options)


def fast_attention() -> Any:
    """The context to run the tower in: cuDNN's attention is the fastest at head size 72."""
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])


def same_shape_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Full attention within each image of a batch of images of one shape.

    Args:
        query, key, value: (1, heads, images * patches, head_dim).
        max_length_q: patches of an image.

    Returns:
        (1, images * patches, heads, head_dim), and no weights.
    """
    del module, attention_mask, kwargs
    heads, patches, size = query.shape[1:]

    def by_image(states: torch.Tensor) -> torch.Tensor:
        return states.reshape(heads, patches // max_length_q, max_length_q, size).transpose(0, 1)

    attended = scaled_dot_product_attention(by_image(query), by_image(key), by_image(value), scale=scaling)
    return attended.transpose(1, 2).reshape(1, patches, heads, size), None
