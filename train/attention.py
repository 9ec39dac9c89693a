"""Who sees whom in a pack, as the attention mask that the stock model takes."""

from __future__ import annotations

import torch


def dense_mask(visible_until: torch.Tensor) -> torch.Tensor:
    """The dense mask of a row.

    Args:
        visible_until: (S,) integer; position k is seen by the positions q with k <= q < visible_until[k].

    Returns:
        (1, 1, S, S) bool, True where query (third axis) sees key (fourth axis).
    """
    index = torch.arange(visible_until.shape[0], device=visible_until.device)
    causal = index[:, None] >= index[None, :]
    return (causal & (index[:, None] < visible_until[None, :]))[None, None]
