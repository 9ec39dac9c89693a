"""What FlashAttention computes, in plain torch, behind its operators on a CPU. To be imported for that alone.

It sees what the library sees: blocks that are seen whole, blocks in which the comparison decides, nothing else.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from train.flash import packed_flash, packed_flash_backward
from train.pack_mask import BLOCK_SIZE


def seen(
    visible_until: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
    full_counts: torch.Tensor,
    full_index: torch.Tensor,
    *,
    by_key: bool,
) -> torch.Tensor:
    """(S, S) bool, [query, key], from the blocks of each query, or of each key."""
    place = torch.arange(len(visible_until))
    compared = (place[:, None] >= place[None, :]) & (place[:, None] < visible_until[None, :])
    mask = torch.zeros_like(compared)
    for line in range(counts.shape[-1]):
        for numbers, places, whole in ((counts, index, False), (full_counts, full_index, True)):
            for other in places[0, 0, line, : int(numbers[0, 0, line])].tolist():
                query, key = (other, line) if by_key else (line, other)
                tile = _stretch(query), _stretch(key)
                mask[tile] = True if whole else compared[tile]
    return mask


def _stretch(block: int) -> slice:
    return slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)


@packed_flash.register_kernel("cpu")
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible_until: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
    full_counts: torch.Tensor,
    full_index: torch.Tensor,
    *rest: torch.Tensor | float,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = seen(visible_until, counts, index, full_counts, full_index, by_key=False)
    scale = float(rest[-1])
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
    repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ repeated.transpose(-1, -2)).float() * scale
    return attended.transpose(1, 2).contiguous(), scores.masked_fill(~mask, -torch.inf).logsumexp(-1)


@packed_flash_backward.register_kernel("cpu")
def _(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    logsumexp: torch.Tensor,
    visible_until: torch.Tensor,
    counts: torch.Tensor,
    index: torch.Tensor,
    full_counts: torch.Tensor,
    full_index: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the formulas of the paper, from what the forward pass kept (https://arxiv.org/abs/2205.14135, appendix B)."""
    mask = seen(visible_until, counts, index, full_counts, full_index, by_key=True)
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ keys.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    weights = torch.exp(scores - logsumexp[..., None])
    wanted = gradient.transpose(1, 2)
    of_weights = wanted @ values.transpose(-1, -2) - (wanted * attended.transpose(1, 2)).sum(-1, keepdim=True)
    of_scores = weights * of_weights * scale

    def summed(by_head: torch.Tensor) -> torch.Tensor:
        return by_head.unflatten(1, (-1, groups)).sum(2)

    found = (
        of_scores @ keys,
        summed(of_scores.transpose(-1, -2) @ query),
        summed(weights.transpose(-1, -2) @ wanted),
    )
    return tuple(x.transpose(1, 2).contiguous() for x in found)  # type: ignore[return-value]
