"""What the vision tower derives from the images' grids: made once a shape, and without keeping the GPU waiting.

The stock functions read the grids back from the device, which waits for everything that was asked of it before. Here
they run on a stream of their own, where nothing else is, and their results are kept. The numbers are the stock ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

Grids = tuple[tuple[int, int, int], ...]
_KEPT = 64


class Positions:
    """Makes the tower's arguments about positions.

    Args:
        module: the stock vision model.
        device: where it is.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.of = lru_cache(_KEPT)(self._of)

    def _of(self, grids: Grids) -> dict[str, torch.Tensor]:
        """The stock model's keyword arguments for images of these grids of patches.

        Returns:
            grid_thw (images, 3) on the CPU; interp_indices, interp_weights (P, taps), position_ids (P, 2) on the
            device; cu_seqlens (images + 1,) int32, where the attention wants it.
        """
        from transformers.utils.generic import is_flash_attention_requested
        from transformers.vision_utils import (
            get_vision_cu_seqlens,
            get_vision_interpolation_indices_and_weights,
            get_vision_position_ids,
        )

        module, merge = self._module, self._module.config.spatial_merge_size
        on_host = torch.tensor(grids)
        with self._aside():
            there = on_host.to(self._device)
            indices, weights = get_vision_interpolation_indices_and_weights(
                there,
                num_grid_per_side=module.num_grid_per_side,
                mode=module.interpolation_mode,
                align_corners=module.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            found = {
                "interp_indices": indices,
                "interp_weights": weights,
                "position_ids": get_vision_position_ids(on_host, merge).to(self._device),
            }
            boundaries = get_vision_cu_seqlens(on_host)
            # Other attention is called image by image, and reads them in every block: on the host nothing waits for it.
            if is_flash_attention_requested(module.config):
                boundaries = boundaries.to(self._device)
        self._join([*found.values(), boundaries])
        return {**found, "cu_seqlens": boundaries, "grid_thw": on_host}

    def _aside(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _join(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let the current stream use what was made on the other one."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(current)
