"""Who sees whom in a pack, for two ways to compute: by blocks on GPUs, by a dense mask elsewhere.

Both are one comparison: the token at row position k is seen by the positions q with k <= q < visible_until[k].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask

BLOCK_SIZE = 128  # flex_attention's own; rows are padded to multiples of it


def dense_mask(visible_until: torch.Tensor) -> torch.Tensor:
    """The dense mask of a row.

    Args:
        visible_until: (S,) integer.

    Returns:
        (1, 1, S, S) bool, True where query (third axis) sees key (fourth axis).
    """
    index = torch.arange(visible_until.shape[0], device=visible_until.device)
    causal = index[:, None] >= index[None, :]
    return (causal & (index[:, None] < visible_until[None, :]))[None, None]


class PackMask(BlockMask):
    """The mask of a row by blocks, for flex_attention and for FlashAttention.

    Attributes:
        visible_until: (S,) int32.
    """

    visible_until: torch.Tensor


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Which blocks of a row's mask hold anything, found on the host, ahead of need.

    Attributes, by torch's names; B blocks, and what stands behind a count has no meaning:
        kv_num_blocks, full_kv_num_blocks: (1, 1, B) int32, blocks of keys that a block of queries sees in part, and
            whole.
        kv_indices, full_kv_indices: (1, 1, B, B) int32, which ones.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same the other way round, for the backward pass.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor
    full_kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    full_q_num_blocks: torch.Tensor
    full_q_indices: torch.Tensor

    @classmethod
    def of(cls, visible_until: npt.NDArray[np.int64]) -> BlockLayout:
        """Find the blocks.

        Args:
            visible_until: (S,), S a multiple of BLOCK_SIZE.
        """
        ends = visible_until.reshape(-1, BLOCK_SIZE)
        block = np.arange(len(ends))
        query, key = block[:, None], block[None, :]
        # In an earlier block of keys, the longest visible reaches the first query; the shortest, the last one.
        some = (key < query) & (ends.max(axis=1)[None, :] > query * BLOCK_SIZE)
        every = (key < query) & (ends.min(axis=1)[None, :] >= (query + 1) * BLOCK_SIZE)
        partial = (some & ~every) | (key == query)
        return cls(*_ordered(partial), *_ordered(every), *_ordered(partial.T), *_ordered(every.T))

    def map_tensors(self, how: str, *args: object, **kwargs: object) -> BlockLayout:
        """A copy in which the method `how` was called on every tensor."""
        return BlockLayout(*(getattr(getattr(self, f.name), how)(*args, **kwargs) for f in fields(self)))

    def block_mask(self, visible_until: torch.Tensor) -> PackMask:
        """The mask, on the tensors' device."""

        def visible(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (query < visible_until[key])

        mask = PackMask.from_kv_blocks(
            self.kv_num_blocks,
            self.kv_indices,
            self.full_kv_num_blocks,
            self.full_kv_indices,
            BLOCK_SIZE=BLOCK_SIZE,
            mask_mod=visible,
            compute_q_blocks=False,  # torch would find them on the device, in dozens of small kernels
        )
        assert isinstance(mask, PackMask)
        mask.q_num_blocks, mask.q_indices = self.q_num_blocks, self.q_indices
        mask.full_q_num_blocks, mask.full_q_indices = self.full_q_num_blocks, self.full_q_indices
        mask.visible_until = visible_until.int()
        return mask


def _ordered(blocks: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of the True blocks of each row, those first."""
    count = blocks.sum(axis=1).astype(np.int32)
    index = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(count)[None, None], torch.from_numpy(index)[None, None]
