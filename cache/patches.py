"""Patches of bytes: an eighth of what the tower takes, to hand from process to process and to the GPU.

The stock processor turns each byte of the resized image into a number by itself, the same for all of a channel, and
repeats the image to fill a patch's frames. So the bytes and a table of 256 numbers a channel say it all, and what comes
out on the other side is what the processor would have given, bit for bit.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from cache.preprocess import ImageProcessor

_CHANNELS = 3
_BYTES = 256


def cut(processor: ImageProcessor, image: Image.Image, *, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Resize an image and cut it into patches, as the stock processor does, but do not normalize.

    Args:
        image: as `cache.preprocess.decode` gives it; `where` names it in errors.

    Returns:
        patches: (P, C, patch * patch) uint8.
        image_grid_thw: (3,) int64.

    Raises:
        DataError: see ImageProcessor.
    """
    values, grid = processor(image, where=where, do_rescale=False, do_normalize=False, temporal_patch_size=1)
    return values.to(torch.uint8).view(len(values), _CHANNELS, -1), grid


class Normalizer:
    """From patches to the tower's input, wherever the patches are."""

    def __init__(self, processor: ImageProcessor, device: torch.device) -> None:
        """Let the stock processor normalize every byte once."""
        self._frames = processor.temporal_patch_size
        table = _table(processor)
        self._table = table.flatten().to(device)
        self._starts = torch.arange(0, table.numel(), _BYTES, dtype=torch.int32, device=device)[:, None]

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """Give what the stock processor gives for the image.

        Args:
            patches: (P, C, patch * patch) uint8, on any device; pinned ones travel without the host waiting for them.

        Returns:
            (P, C * T * patch * patch) float32, on the table's device.
        """
        count, channels, size = patches.shape
        places = patches.to(self._table.device, non_blocking=True).to(torch.int32) + self._starts
        values = self._table.index_select(0, places.flatten()).view(count, channels, 1, size)
        return values.expand(-1, -1, self._frames, -1).reshape(count, -1)


def _table(processor: ImageProcessor) -> torch.Tensor:
    """(C, 256) float32: what the processor makes of each byte, found by showing it an image that has them all."""
    factor = processor.patch_size * processor.merge_size
    side = factor * -(-16 // factor)
    ramp = (np.arange(side * side) % _BYTES).astype(np.uint8).reshape(side, side)
    image = Image.fromarray(np.repeat(ramp[:, :, None], _CHANNELS, axis=2))
    where = "an image with all bytes"
    numbers, _ = processor(image, where=where, do_resize=False)
    raw, _ = processor(image, where=where, do_resize=False, do_rescale=False, do_normalize=False)
    shape = (len(numbers), _CHANNELS, -1)
    table = torch.empty(_CHANNELS, _BYTES)
    for channel in range(_CHANNELS):
        table[channel, raw.view(shape)[:, channel].flatten().long()] = numbers.view(shape)[:, channel].flatten().float()
    return table
