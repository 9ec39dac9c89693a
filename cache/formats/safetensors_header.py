"""Reads the header of a safetensors file, or of one that lies inside another file, and believes nothing in it.

Format: https://github.com/huggingface/safetensors#format: the header's size (8 bytes, little-endian), the header
(JSON), the tensors' bytes without holes. The library gives no offsets, and reading into a given buffer needs them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from cache.formats.extents import ShardFile, TensorExtent

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


def read_header(file: ShardFile, start: int, size: int, metadata: dict[str, str]) -> dict[str, TensorExtent]:
    """The tensors of the safetensors file that lies at bytes `start` to `start + size` of `file`, by name.

    Args:
        metadata: what `__metadata__` holds where there is one; anything else would be bytes that no check covers.

    Raises:
        ValueError: it is not a safetensors file, or its tensors do not tile it.
        OSError: it cannot be read.
    """
    file.require(start, size, "a safetensors file")
    length = int.from_bytes(file.bytes_at(start, 8, "a header's size"), "little") if size >= 8 else size
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"is not a safetensors file: a header of {length} bytes in {size}")
    header = _parse(file.bytes_at(start + 8, length, "a header"))
    if header.pop("__metadata__", metadata) != metadata:
        raise ValueError("is not a safetensors file of this kind: unknown metadata")
    data = start + 8 + length
    tensors = {name: _extent(name, described, data) for name, described in header.items()}
    place = data
    for name, extent in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if extent.offset != place:
            raise ValueError(f"tensor {name[:100]!r} overlaps another one or leaves a hole")
        place += extent.num_bytes
    if place != start + size:
        raise ValueError(f"its tensors end at byte {place} instead of {start + size}")
    return tensors


def _parse(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a safetensors file: {type(error).__name__} in the header") from error
    if not isinstance(header, dict):
        raise ValueError("is not a safetensors file: the header is no object")
    return header


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _extent(name: str, described: Any, data: int) -> TensorExtent:
    """A tensor's description, checked."""
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:100]!r} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"tensor {name[:100]!r} has the dtype {str(dtype)[:20]!r}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise ValueError(f"tensor {name[:100]!r} has no usable shape or offsets")
    if math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(f"tensor {name[:100]!r} takes other bytes than its shape and dtype do")
    return TensorExtent(data + offsets[0], DTYPES[dtype], tuple(shape))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
