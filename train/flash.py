"""FlashAttention-4 over packs, for GPUs of Hopper's kind (docs/decisions/0014-flash-attention-4.md).

The kernels are the library's (https://github.com/Dao-AILab/flash-attention, flash_attn/cute); they are given the same
blocks and the same comparison as flex_attention. The backward pass adds a query's gradients up in the order in which
blocks end, so two runs differ in the last bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from train.pack_mask import BLOCK_SIZE, PackMask

_SIZE = (BLOCK_SIZE, BLOCK_SIZE)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PackMask, scale: float
) -> torch.Tensor:
    """Attention of a pack, differentiable.

    Args:
        query: (1, heads, S, head_dim), bfloat16 or float16; key, value: (1, key-value heads, S, head_dim).

    Returns:
        (1, S, heads, head_dim).
    """
    attended: torch.Tensor
    attended, _ = packed_flash(
        query,
        key,
        value,
        mask.visible_until,
        mask.kv_num_blocks,
        mask.kv_indices,
        mask.full_kv_num_blocks,
        mask.full_kv_indices,
        mask.q_num_blocks,
        mask.q_indices,
        mask.full_q_num_blocks,
        mask.full_q_indices,
        scale,
    )
    return attended


# Operators of their own: the compiler neither looks into them nor breaks a layer's graph at them.
@torch.library.custom_op("vision_once::packed_flash", mutates_args=())
def packed_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible_until: torch.Tensor,
    kv_num_blocks: torch.Tensor,
    kv_indices: torch.Tensor,
    full_kv_num_blocks: torch.Tensor,
    full_kv_indices: torch.Tensor,
    q_num_blocks: torch.Tensor,
    q_indices: torch.Tensor,
    full_q_num_blocks: torch.Tensor,
    full_q_indices: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward pass. Blocks as in torch's BlockMask, those by queries for the backward pass.

    Returns:
        (1, S, heads, head_dim) in the query's dtype, and (1, heads, S) float32, the logarithm of each query's sum.
    """
    del q_num_blocks, q_indices, full_q_num_blocks, full_q_indices
    from flash_attn.cute.interface import _flash_attn_fwd

    blocks = _blocks(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    attended, logsumexp, *_ = _flash_attn_fwd(
        *_by_position(query, key, value),
        softmax_scale=scale,
        return_lse=True,
        mask_mod=_visible(),
        aux_tensors=[visible_until],
        block_sparse_tensors=blocks,
    )
    return attended, logsumexp


@packed_flash.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, length, width = query.shape
    attended = query.new_empty(batch, length, heads, width)
    return attended, query.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("vision_once::packed_flash_backward", mutates_args=())
def packed_flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    logsumexp: torch.Tensor,
    visible_until: torch.Tensor,
    q_num_blocks: torch.Tensor,
    q_indices: torch.Tensor,
    full_q_num_blocks: torch.Tensor,
    full_q_indices: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key and value, each (1, S, its heads, head_dim)."""
    from flash_attn.cute.interface import _flash_attn_bwd

    query, key, value = _flash_attn_bwd(
        *_by_position(query, key, value),
        attended,
        gradient,
        logsumexp,
        softmax_scale=scale,
        mask_mod=_visible(),
        aux_tensors=[visible_until],
        block_sparse_tensors=_blocks(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices),
    )
    return query, key, value


@packed_flash_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del gradient
    query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _by_position(query, key, value))
    return query, key, value


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, visible_until, *blocks, scale = inputs
    ctx.save_for_backward(query, key, value, *output, visible_until, *blocks[4:])
    ctx.scale = scale


def _gradients(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    found = packed_flash_backward(gradient, *ctx.saved_tensors, ctx.scale)
    return *(x.transpose(1, 2) for x in found), *(None for _ in range(10))


packed_flash.register_autograd(_gradients, setup_context=_remember)


def _by_position(*states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(1, heads, S, head_dim) -> (1, S, heads, head_dim), as the library wants it."""
    return tuple(x.transpose(1, 2) for x in states)


def _blocks(*of_mask: torch.Tensor) -> Any:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    return BlockSparseTensorsTorch(*of_mask, block_size=_SIZE)


@functools.cache
def _visible() -> Any:
    """The comparison of train.pack_mask in the library's language."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def visible(_batch, _head, query, key, _lengths, aux):  # type: ignore[no-untyped-def]
        until = utils.scalar_to_ssa(aux[0][key[0]], cutlass.Int32)
        return (query >= key) & (query < until)

    return visible
