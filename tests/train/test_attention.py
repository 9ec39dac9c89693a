"""The block layout against the dense mask, over random forests of visibility."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from train.pack_mask import BLOCK_SIZE, BlockLayout, dense_mask


@st.composite
def visibilities(draw: st.DrawFn) -> npt.NDArray[np.int64]:
    """Ends of nested stretches over two to four blocks."""
    length = BLOCK_SIZE * draw(st.integers(1, 4))
    until = np.full(length, length)

    def nest(start: int, stop: int, depth: int) -> None:
        cuts = sorted({*draw(st.lists(st.integers(start, stop), max_size=3)), stop})
        for cut in cuts:
            if cut > start:
                until[start:cut] = cut
                if depth and cut - start > 4:
                    nest(start + (cut - start) // 2, cut, depth - 1)
            start = cut

    nest(0, length, 2)
    return until


@given(until=visibilities())
@settings(max_examples=60, deadline=None)
def test_block_layout_is_the_dense_mask(until: npt.NDArray[np.int64]) -> None:
    tensor = torch.from_numpy(until)
    mask = BlockLayout.of(until).block_mask(tensor)
    dense = dense_mask(tensor)[0, 0]
    blocks = len(until) // BLOCK_SIZE
    tiles = dense.reshape(blocks, BLOCK_SIZE, blocks, BLOCK_SIZE)
    for query in range(blocks):
        full = set(mask.full_kv_indices[0, 0, query, : int(mask.full_kv_num_blocks[0, 0, query])].tolist())
        partial = set(mask.kv_indices[0, 0, query, : int(mask.kv_num_blocks[0, 0, query])].tolist())
        assert not full & partial
        for key in range(blocks):
            tile = tiles[query, :, key]
            if key in full:
                assert tile.all()
            elif key not in partial:
                assert not tile.any()
    # Inside partial blocks the mask function decides.
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, len(until), len(until), device="cpu")[0, 0], dense)


@given(until=visibilities())
@settings(max_examples=60, deadline=None)
def test_blocks_by_keys_are_those_that_torch_finds(until: npt.NDArray[np.int64]) -> None:
    mask = BlockLayout.of(until).block_mask(torch.from_numpy(until))
    theirs = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    )
    for counts, indices in (("q_num_blocks", "q_indices"), ("full_q_num_blocks", "full_q_indices")):
        count = getattr(theirs, counts)
        assert torch.equal(getattr(mask, counts), count)
        known = torch.arange(count.shape[-1]) < count[..., None]
        assert torch.equal(getattr(mask, indices)[known], getattr(theirs, indices)[known])
        assert getattr(mask, indices).dtype == getattr(theirs, indices).dtype
        assert getattr(mask, indices).is_contiguous()  # as the kernels read them


def test_block_layout_is_no_larger_than_torchs_own() -> None:
    until = torch.arange(4 * BLOCK_SIZE)
    until = (until // 100 + 1) * 100
    until = until.clamp(max=4 * BLOCK_SIZE)
    mask = BlockLayout.of(until.numpy()).block_mask(until)
    theirs = create_block_mask(mask.mask_mod, 1, 1, len(until), len(until), device="cpu")
    assert torch.equal(mask.kv_num_blocks + mask.full_kv_num_blocks, theirs.kv_num_blocks + theirs.full_kv_num_blocks)
