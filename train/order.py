"""The order of samples: a pure function of seed and epoch, so that resuming needs no replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from train.sample import Sample

Order = Literal["sample", "image", "file"]


def epoch_order(samples: Sequence[Sample], order: Order, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """(n,) int64, the samples of an epoch in the order in which steps take them.

    `sample`: a plain permutation, numpy.random.default_rng((seed, epoch)).permutation(n).
    `image`: samples over the same images come together; the groups are shuffled, and the samples within each. A sample
    without images is a group of its own.
    `file`: as they stand in the dataset, every epoch.
    """
    if order == "file":
        return np.arange(len(samples))
    generator = np.random.default_rng((seed, epoch))
    if order == "sample":
        return generator.permutation(len(samples))
    groups: dict[object, list[int]] = {}
    for index, sample in enumerate(samples):
        keys = tuple(image.key for image in sample.images)
        groups.setdefault(keys or index, []).append(index)
    members = [np.asarray(group) for group in groups.values()]
    shuffled = [generator.permutation(members[place]) for place in generator.permutation(len(members))]
    return np.concatenate(shuffled)
