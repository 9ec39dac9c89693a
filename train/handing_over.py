"""A step from a worker process to the one that trains, in as few pieces of shared memory as can be.

Each tensor handed over by itself is an open file in both processes, and a connection between them: for a step of 256
questions, each on its own image, more than the 1024 files that a process may have by default.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch

_ALIGNMENT = 64  # bytes, enough for any dtype


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: in which piece, from which byte on, and as what."""

    piece: int
    start: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True, slots=True)
class Bundle:
    """An object with its tensors beside it, as it is handed over.

    Attributes:
        form: the object without its tensors, pickled.
        places: of its tensors.
        pieces: (B,) uint8, shared memory. Tensors that lay in such already stay there; the first holds all others.
    """

    form: bytes
    places: tuple[_Place, ...]
    pieces: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, content: Any) -> Bundle:
        """Take an object's tensors, which are on the CPU, out of it."""
        form = io.BytesIO()
        pickler = _Pickler(form)
        pickler.dump(content)
        pieces = [torch.empty(0)]
        numbers: dict[int, int] = {}
        places: list[_Place] = []
        moved: list[tuple[int, torch.Tensor]] = []
        size = 0
        for tensor in pickler.tensors:
            storage = tensor.untyped_storage()
            if storage.is_shared() and tensor.is_contiguous():
                piece = numbers.setdefault(storage.data_ptr(), len(pieces))
                start = int(tensor.storage_offset()) * tensor.element_size()
                if piece == len(pieces):
                    pieces.append(torch.empty(0, dtype=torch.uint8).set_(storage))
            else:
                piece, start = 0, size
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                moved.append((len(places), tensor))
            places.append(_Place(piece, start, tensor.dtype, tensor.shape))
        pieces[0] = shared_bytes(max(size, 1))
        bundle = cls(form.getvalue(), tuple(places), tuple(pieces))
        for number, tensor in moved:
            bundle.tensor(number).copy_(tensor)
        return bundle

    def content(self) -> Any:
        """The object, its tensors where they lie."""
        return _Unpickler(io.BytesIO(self.form), self).load()

    def tensor(self, number: int) -> torch.Tensor:
        """One of the tensors."""
        place = self.places[number]
        stop = place.start + place.shape.numel() * place.dtype.itemsize
        return self.pieces[place.piece][place.start : stop].view(place.dtype).view(place.shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """What it reads comes from a process that this one started, as torch's own queues do."""

    def __init__(self, file: io.BytesIO, bundle: Bundle) -> None:
        super().__init__(file)
        self._bundle = bundle

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._bundle.tensor(number)


def shared_bytes(count: int) -> torch.Tensor:
    """(count,) uint8 in memory that other processes can map."""
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]  # as default_collate does
    return torch.empty(0, dtype=torch.uint8).set_(storage)
