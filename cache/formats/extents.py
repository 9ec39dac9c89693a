"""Where an entry's bytes lie in a file, and how they are read from there: straight into the tensors.

All formats store tensors as plain little-endian bytes, so a format only has to say where they lie. Reads are positional
(preadv): an open shard may be used by threads and by forked processes, and no library keeps a state of its own.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cache.features import QUANTIZED_DTYPES, SCALE_DTYPE, SCALES, StoredFeatures, stored_features
from cache.formats.relay import Arrived, Part, Reader

FIELDS = ("image_embeds", "deepstack_features", "image_grid_thw")
KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIMENSION = 1 << 31
OUT_ALIGNMENT = 64  # bytes; what torch's own allocations have
_MAX_READ = 1 << 30  # Linux returns at most 2 GiB - 4 KiB a call
_reader = Reader()  # of this process: whether a second thread helps depends on the machine, not on the file


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """A tensor in a file.

    Attributes:
        offset: of its first byte from the start of the file.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class EntryExtents:
    """The three tensors of an entry; of a quantised one four.

    Raises:
        ValueError: they cannot be the features of an image. Checked here so that no memory is taken for them.
    """

    image_embeds: TensorExtent
    deepstack_features: TensorExtent
    image_grid_thw: TensorExtent
    scales: TensorExtent | None = None

    def __post_init__(self) -> None:
        embeds, deepstack, grid = self.image_embeds, self.deepstack_features, self.image_grid_thw
        sizes = (*embeds.shape, *deepstack.shape)
        if len(embeds.shape) != 2 or len(deepstack.shape) != 3 or deepstack.shape[1:] != embeds.shape:
            raise ValueError(f"shapes {embeds.shape} and {deepstack.shape} are not (N, D) and (L, N, D)")
        if min(embeds.shape) < 1 or min(sizes) < 0 or max(sizes) >= MAX_DIMENSION:
            raise ValueError(f"shape {deepstack.shape} cannot be")
        allowed = FLOATS if self.scales is None else QUANTIZED_DTYPES.values()
        if embeds.dtype not in allowed or deepstack.dtype != embeds.dtype:
            raise ValueError(f"dtypes {embeds.dtype} and {deepstack.dtype} cannot be")
        if self.scales is not None and (self.scales.dtype, self.scales.shape) != (
            SCALE_DTYPE,
            (1 + deepstack.shape[0], embeds.shape[0]),
        ):
            raise ValueError(f"scales is {self.scales.dtype} {self.scales.shape}, not one a token and level")
        if (grid.dtype, grid.shape) != (torch.int64, (3,)):
            raise ValueError(f"image_grid_thw is {grid.dtype} {grid.shape}, not int64 (3,)")

    @property
    def out_bytes(self) -> int:
        """Bytes that a buffer needs to take the feature tensors and the scales."""
        *first, last = (extent.num_bytes for extent in self.features.values())
        return sum(map(_aligned, first)) + last

    @property
    def features(self) -> dict[str, TensorExtent]:
        """Everything but the grid, by field."""
        found = {"image_embeds": self.image_embeds, "deepstack_features": self.deepstack_features}
        return found if self.scales is None else {**found, SCALES: self.scales}


class ShardFile:
    """A regular file, open for positional reads.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK, opening a named pipe would wait for ever for somebody to write to it.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise ValueError("is not a regular file")

    def close(self) -> None:
        """Release the file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()

    def require(self, offset: int, size: int, what: str) -> None:
        """Refuse bytes that are not in the file.

        Raises:
            ValueError: they are not.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"{what} reaches outside of the file: bytes {offset} to {offset + size} of {self.size}")

    def bytes_at(self, offset: int, size: int, what: str) -> bytes:
        """Some bytes.

        Raises:
            ValueError: they are not in the file.
        """
        self.require(offset, size, what)
        content = bytearray(size)
        self.fill(memoryview(content), offset)
        return bytes(content)

    def fill(self, target: memoryview, offset: int) -> None:
        """Read as many bytes as `target` has, from `offset` on.

        Raises:
            ValueError: the file ends before.
            OSError: it cannot be read.
        """
        while target.nbytes:
            count = os.preadv(self._descriptor, [target[:_MAX_READ]], offset)
            if count == 0:
                raise ValueError(f"the file ends at byte {offset}, before the entry does")
            target, offset = target[count:], offset + count

    def fill_parts(self, parts: Sequence[Part], arrived: Arrived) -> None:
        """Read several places, and give `arrived` all their bytes in the order of `parts`.

        Raises:
            ValueError, OSError: see `fill`.
        """
        _reader.read(parts, self.fill, arrived)

    def read_entry(
        self, extents: EntryExtents, out: torch.Tensor | None, arrived: Arrived | None = None
    ) -> StoredFeatures:
        """The tensors of an entry.

        Args:
            out: see `ShardReader.read`.
            arrived: is given the bytes in the order in which a checksum goes over them.
        """
        grid_at = extents.image_grid_thw
        places = extents.features | {"image_grid_thw": grid_at}
        for extent in places.values():
            self.require(extent.offset, extent.num_bytes, "a tensor")
        tensors = _targets(extents, out) | {"image_grid_thw": torch.empty(grid_at.shape, dtype=grid_at.dtype)}
        features = stored_features(tensors)
        filled = [(name, tensor) for name, tensor in features.tensors().items() if tensor.numel()]
        parts = [(tensor.view(-1).view(torch.uint8).numpy().data, places[name].offset) for name, tensor in filled]
        if arrived is not None:
            self.fill_parts(parts, arrived)
        else:
            for memory, offset in parts:
                self.fill(memory, offset)
        return features


def _targets(extents: EntryExtents, out: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if out is None:
        return {field: torch.empty(at.shape, dtype=at.dtype) for field, at in extents.features.items()}
    if out.dtype != torch.uint8 or out.ndim != 1 or not out.is_contiguous() or out.device.type != "cpu":
        raise TypeError(f"out is {out.dtype} {tuple(out.shape)} on {out.device}, not contiguous uint8 bytes on the CPU")
    if out.numel() < extents.out_bytes:
        raise TypeError(f"out has {out.numel()} bytes; the entry takes {extents.out_bytes}")
    targets, start = {}, 0
    for field, at in extents.features.items():
        targets[field] = out[start : start + at.num_bytes].view(at.dtype).view(at.shape)
        start += _aligned(at.num_bytes)
    return targets


def _aligned(size: int) -> int:
    return -(-size // OUT_ALIGNMENT) * OUT_ALIGNMENT
