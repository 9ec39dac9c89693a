"""A data loader whose worker processes leave alone what the parent has thrown away but not yet freed.

Workers are forked. When Python collects garbage in one, it may meet the parent's tensors in page-locked or GPU memory
that stand in a cycle; freeing those there ends the process, since CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


class ForkingLoader(DataLoader[T]):
    """torch's DataLoader. Objects of the parent are frozen in its workers, as Python's gc.freeze is made for."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        gc.collect()
        gc.freeze()
        try:
            return super().__iter__()
        finally:
            gc.unfreeze()
