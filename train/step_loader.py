"""Steps from data-loader workers, ahead of need."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from cache.forking_loader import ForkingLoader
from cache.pixels import leave_signals_to_parent
from train.shared_memory import allow_open_files
from train.step import Step
from train.step_dataset import StepDataset, StepIndex


class StepSampler(Sampler[list[StepIndex]]):
    """Yields [(epoch, step)]; the epoch is set from outside, as transformers.Trainer does."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order comes next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[StepIndex]]:
        for step in range(self._steps):
            yield [(self.epoch, step)]


class StepLoader(ForkingLoader[Step]):
    """A data loader that passes `set_epoch` on to its sampler."""

    def set_epoch(self, epoch: int) -> None:
        """Called by transformers.Trainer before each epoch."""
        sampler = self.batch_sampler
        if isinstance(sampler, StepSampler):
            sampler.set_epoch(epoch)


class OneAhead:
    """Steps of an epoch, each taken when the one behind it is there, so that their first packs can be copied early.

    The first of an epoch is an exception: nothing was made ahead, and while it is computed the others are.

    Attributes:
        following: the step behind the one that was taken last; None where it is not known, or there is none.
    """

    def __init__(self) -> None:
        self.following: Step | None = None
        self._begins = True

    def take(self, steps: Iterator[Step]) -> Step | None:
        """The next step of an epoch; None at its end."""
        step = self.following if self.following is not None else next(steps, None)
        self.following = None if self._begins else next(steps, None)
        self._begins = not self._begins and self.following is None
        return step


def make_loader(
    dataset: StepDataset, *, num_workers: int, pin_memory: bool, prefetch_factor: int, persistent_workers: bool
) -> StepLoader:
    """A loader over a dataset of steps; arguments as in torch's DataLoader."""
    if num_workers:
        allow_open_files()
    return StepLoader(
        dataset,
        batch_sampler=StepSampler(len(dataset)),
        collate_fn=_only,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        worker_init_fn=leave_signals_to_parent,
    )


def _only(steps: list[Step]) -> Step:
    (step,) = steps
    return step
