"""Writes safetensors whose features start on a page of the file that holds them.

Format: https://github.com/huggingface/safetensors#format. The library pads its header to 8 bytes only, and the kernel
copies from the page cache to memory at little more than half the speed where the two are not aligned alike.
"""

from __future__ import annotations

import json
from typing import BinaryIO

import torch

from cache.features import SCALES
from cache.formats.safetensors_header import DTYPES

PAGE = 4096
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SMALL = ("image_grid_thw", SCALES)


class SafetensorsLayout:
    """A safetensors file that is going to lie at byte `start` of another file, or is one of its own.

    Attributes:
        num_bytes: of the whole file.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], start: int, metadata: dict[str, str]) -> None:
        # The grids, which would shift everything behind them, come first; as in the library, wide types before narrow.
        self._tensors = sorted(tensors.items(), key=lambda item: (not _is_small(item[0]), -item[1].dtype.itemsize))
        header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
        place = 0
        for name, tensor in self._tensors:
            end = place + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [place, end],
            }
            place = end
        text = json.dumps(header, separators=(",", ":")).encode()
        small = sum(t.numel() * t.element_size() for name, t in self._tensors if _is_small(name))
        # The format wants the header's end at a multiple of 8.
        text += b" " * (-(start + 8 + len(text) + small - small % 8) % PAGE)
        self._header = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self._header) + place

    def write(self, file: BinaryIO) -> None:
        """Append it to a file.

        Raises:
            OSError: it cannot be written.
        """
        file.write(self._header)
        for _, tensor in self._tensors:
            if tensor.numel():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _is_small(name: str) -> bool:
    return name.endswith(_SMALL)
