"""A data loader whose worker processes leave alone what the parent has thrown away but not yet freed.

Workers are forked. When Python collects garbage in one, it may meet the parent's tensors in page-locked or GPU memory
that stand in a cycle; freeing those there ends the process, since CUDA does not survive a fork.
"""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class _Process(ForkProcess):
    """Begins with everything of the parent's frozen, as Python's gc.freeze is made for."""

    def start(self) -> None:
        gc.collect(1)  # unfreezing makes old garbage of the young, which is looked for rarely
        gc.freeze()
        try:
            super().start()
        finally:
            gc.unfreeze()


class _Context(ForkContext):
    Process = _Process


class ForkingLoader(DataLoader[T]):
    """torch's DataLoader, arguments as there. Objects of the parent are frozen in its workers.

    The context does that, not the loader: accelerate hands it on to the loader that it makes of this one to go on in
    the middle of an epoch.
    """

    def __init__(self, dataset: Dataset[T], *, num_workers: int = 0, **arguments: Any) -> None:
        forks = num_workers > 0 and multiprocessing.get_start_method() == "fork"
        context = _Context() if forks else None
        super().__init__(dataset, num_workers=num_workers, multiprocessing_context=context, **arguments)
