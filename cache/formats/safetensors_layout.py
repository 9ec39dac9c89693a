"""Writes safetensors whose features start on a page of the file that holds them.

Format: https://github.com/huggingface/safetensors#format. The library pads its header to 8 bytes only, and the kernel
copies from the page cache to memory at little more than half the speed where the two are not aligned alike.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from cache.features import SCALES
from cache.formats.base import OutputFile
from cache.formats.safetensors_header import DTYPES

PAGE = 4096
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SMALL = ("image_grid_thw", SCALES)


class SafetensorsLayout:
    """A whole safetensors file that is going to lie at byte `start` of another file.

    Attributes:
        num_bytes: of the whole file.
        offsets: of each tensor's first byte in the other file.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], start: int) -> None:
        # The grids, which would shift everything behind them, come first; as in the library, wide types before narrow.
        self._tensors = sorted(tensors.items(), key=lambda item: (not _is_small(item[0]), -item[1].dtype.itemsize))
        header: dict[str, Any] = {}
        place = 0
        for name, tensor in self._tensors:
            header[name] = described(tensor, place)
            place += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        small = sum(t.nbytes for name, t in self._tensors if _is_small(name))
        # The format wants the header's end at a multiple of 8.
        text += b" " * (-(start + 8 + len(text) + small - small % 8) % PAGE)
        self._header = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self._header) + place
        data = start + len(self._header)
        self.offsets = {name: data + of["data_offsets"][0] for name, of in header.items()}

    def write(self, file: OutputFile) -> None:
        """Append it to a file.

        Raises:
            OSError: it cannot be written.
        """
        file.append(self._header)
        for _, tensor in self._tensors:
            file.append_tensor(tensor)


def described(tensor: torch.Tensor, place: int) -> dict[str, Any]:
    """A tensor's entry in a safetensors header.

    Args:
        place: of its first byte behind the header.
    """
    return {
        "dtype": _NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "data_offsets": [place, place + tensor.nbytes],
    }


def _is_small(name: str) -> bool:
    return name.endswith(_SMALL)
