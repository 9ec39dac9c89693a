"""Steps by their number: which samples, which of them are this process's, and in which packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from train.cut import Costs, balanced_shares, length_of, runs_within
from train.features import FeatureSource
from train.order import Order, epoch_order
from train.pack import Pack, build_pack
from train.prefix_tree import Symbols, sharing_order, symbols_of
from train.sample import Sample, SampleImage, num_image_tokens
from train.step import Step

StepIndex = tuple[int, int]  # (epoch, step within the epoch)


@dataclass(frozen=True, slots=True)
class CutStep:
    """A Step whose images are still to be read; fields as there."""

    packs: tuple[Pack, ...]
    images: tuple[SampleImage, ...]
    total_weight: float
    num_samples: int
    num_image_tokens: int


class StepDataset(Dataset[Step]):
    """Steps by (epoch, number). The order of samples is a pure function of seed and epoch, so resuming needs no replay.

    Args:
        samples: the whole dataset.
        source: reads an image's features (or pixels, on the live path).
        effective_batch_size: samples in a step, over all processes; an epoch's last step may hold fewer.
        tokens_per_pack: see TrainConfig.
        image_token_id, merge_size: of the model.
        seed: of the order; None keeps the dataset's order.
        order, share_prefixes: see TrainConfig.
        blocks: make rows that are attended by blocks.
        equal_packs: give every process of a step the same number of packs; where the base is divided among the
            processes, they must go through its layers together.
        rank, world_size: of this process; the shares of a step are cut so that the longest is as short as can be.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        source: FeatureSource,
        *,
        effective_batch_size: int,
        tokens_per_pack: int,
        image_token_id: int,
        merge_size: int,
        seed: int | None,
        order: Order = "sample",
        share_prefixes: bool = True,
        blocks: bool = False,
        equal_packs: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._samples, self._source = samples, source
        self._batch, self._budget = effective_batch_size, tokens_per_pack
        self._model = {"image_token_id": image_token_id, "merge_size": merge_size}
        self._share, self._blocks, self._equal = share_prefixes, blocks, equal_packs
        self._by: Order = order
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self.stage_names = tuple(dict.fromkeys(span.name for sample in samples for span in sample.text.stages))
        self._order: tuple[int, np.ndarray[Any, Any]] = (-1, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        """Steps in an epoch."""
        return math.ceil(len(self._samples) / self._batch)

    @property
    def num_samples(self) -> int:
        """Samples in an epoch."""
        return len(self._samples)

    def indices(self, epoch: int, step: int) -> list[int]:
        """Which samples are in a step, in order."""
        if self._order[0] != epoch:
            order = np.arange(len(self._samples))
            if self._seed is not None:
                order = epoch_order(self._samples, self._by, seed=self._seed, epoch=epoch)
            self._order = (epoch, order)
        return [int(i) for i in self._order[1][step * self._batch : (step + 1) * self._batch]]

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample."""
        return max(sample.num_tokens for sample in self._samples)

    def heaviest_step(self, epoch: int) -> tuple[int, int]:
        """The step of an epoch with most tokens, and how many of them a process has at most (shared ones once)."""
        heaviest = max(range(len(self)), key=lambda step: self._distinct_tokens(self.indices(epoch, step)))
        costs = self._costs([self._samples[i] for i in self.indices(epoch, heaviest)])[2]
        return heaviest, max(length_of(costs, share) for share in balanced_shares(costs, self._world_size))

    def _distinct_tokens(self, indices: Sequence[int]) -> int:
        """About what samples take in rows: all text, and each image once where prefixes are shared."""
        text = 0
        images: dict[Any, int] = {}
        for index in indices:
            sample = self._samples[index]
            sizes = {image.key: num_image_tokens(image.grid, self._model["merge_size"]) for image in sample.images}
            images |= sizes if self._share else {(index, key): size for key, size in sizes.items()}
            text += sample.num_tokens - sum(sizes.values())
        return text + sum(images.values())

    @property
    def largest_step_bytes(self) -> int:
        """Bytes of the images in a process's share of the step that has most of them, in the first epoch."""
        sizes = (
            {image.key: image.grid for i in self.indices(0, step) for image in self._samples[i].images}
            for step in range(len(self))
        )
        merge = self._model["merge_size"]
        tokens = max(sum(num_image_tokens(grid, merge) for grid in grids.values()) for grids in sizes)
        return math.ceil(tokens / self._world_size) * self._source.bytes_per_token

    def tokens_in_step(self, epoch: int, step: int) -> int:
        """Tokens that the process with most of them computes in a step: each row's shared prefixes once."""
        costs = self._costs([self._samples[i] for i in self.indices(epoch, step)])[2]
        shares = balanced_shares(costs, self._world_size)
        return max(sum(length_of(costs, run) for run in runs_within(costs, share, self._budget)) for share in shares)

    def _costs(self, samples: Sequence[Sample]) -> tuple[list[Symbols], list[int], Costs]:
        """The samples' symbols, the order in which neighbours share most, and what each takes in a row."""
        symbols = symbols_of(samples, self._model["image_token_id"])
        order = sharing_order(symbols) if self._share else list(range(len(samples)))
        return symbols, order, Costs.of(samples, symbols, order, share=self._share, **self._model)

    def __getitem__(self, index: StepIndex) -> Step:
        return self.read(self.cut(index))

    def read(self, step: CutStep) -> Step:
        """Read its images."""
        images = tuple(self._source.load(image) for image in step.images)
        return Step(step.packs, images, step.total_weight, step.num_samples, step.num_image_tokens)

    def cut(self, index: StepIndex) -> CutStep:
        """This process's share of a step, cut into packs."""
        samples = [self._samples[i] for i in self.indices(*index)]
        symbols, order, costs = self._costs(samples)
        working, idle = self._runs(costs)
        runs = [*working, *idle]
        mine = [samples[order[place]] for run in runs for place in run]
        images = {image.key: image for sample in mine for image in sample.images}
        places = {key: place for place, key in enumerate(images)}
        packs = [
            build_pack(
                samples,
                symbols,
                [order[place] for place in run],
                places,
                share=self._share,
                blocks=self._blocks,
                stages=self.stage_names,
                **self._model,
            )
            for run in runs
        ]
        packs[len(working) :] = [
            replace(pack, target_weights=torch.zeros_like(pack.target_weights), stage_weights=None)
            for pack in packs[len(working) :]
        ]
        return CutStep(
            packs=tuple(packs),
            images=tuple(images.values()),
            total_weight=sum(sample.total_weight for sample in samples),
            num_samples=len(samples),
            num_image_tokens=sum(
                num_image_tokens(image.grid, self._model["merge_size"]) for sample in samples for image in sample.images
            ),
        )

    def _runs(self, costs: Costs) -> tuple[list[range], list[range]]:
        """This process's rows of a step, and rows that only keep the other processes company: their loss counts zero.

        A process without a sample in a short step must still take part in the reduction of gradients.
        """
        rows = [runs_within(costs, share, self._budget) for share in balanced_shares(costs, self._world_size)]
        mine = rows[self._rank] if self._rank < len(rows) else []
        wanted = max(map(len, rows)) if self._equal else 1
        held = [place for run in mine for place in run] or range(len(costs.whole))
        shortest = min(held, key=costs.whole.__getitem__)
        return mine, [range(shortest, shortest + 1)] * (wanted - len(mine))
