"""Samples -> one row without padding. Who sees whom is one vector, `visible_until`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from train.sample import Sample, widen


@dataclass(frozen=True, slots=True)
class Pack:
    """Some samples in one row.

    Attributes:
        input_ids: (1, S) int64.
        position_ids: (4, 1, S) int64: running index, then M-RoPE t, h, w.
        visible_until: (S,) int64; the token at row position k is seen by the positions q with
            k <= q < visible_until[k].
        target_positions: (T,) int64, row positions whose logits are needed, ascending.
        target_ids: (T,) int64, the token that each of them must predict.
        target_weights: (T,) float32.
        images: for each image of the row, in order, its place in the step's list of distinct images.
        is_causal: the whole row is one sample, so a plain causal mask does.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    visible_until: torch.Tensor
    target_positions: torch.Tensor
    target_ids: torch.Tensor
    target_weights: torch.Tensor
    images: tuple[int, ...]
    is_causal: bool

    def map_tensors(self, how: str, *args: object, **kwargs: object) -> Pack:
        """A copy in which the method `how` was called on every tensor (`pin_memory`, `to`)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Pack(
            **{
                name: getattr(value, how)(*args, **kwargs) if isinstance(value, torch.Tensor) else value
                for name, value in values.items()
            }
        )


def split_into_packs(lengths: Sequence[int], tokens_per_pack: int) -> list[list[int]]:
    """Cut a list of samples, in order, into runs of at most `tokens_per_pack` tokens.

    A sample longer than that has a run of its own. Order is kept, so the cut never changes what is in a step.
    """
    runs: list[list[int]] = []
    held = 0
    for index, length in enumerate(lengths):
        if not runs or held + length > tokens_per_pack:
            runs.append([])
            held = 0
        runs[-1].append(index)
        held += length
    return runs


def build_pack(
    samples: Iterable[Sample], image_places: dict[str, int], *, image_token_id: int, merge_size: int
) -> Pack:
    """Lay samples one behind the other, each with its own positions and visible to itself only.

    Args:
        samples: in the order of the row.
        image_places: image key -> place in the step's list of distinct images.
    """
    ids, positions, until = [], [], []
    images: list[int] = []
    target_positions, target_ids, target_weights = [], [], []
    start = 0
    for sample in samples:
        row = widen(sample, image_token_id=image_token_id, merge_size=merge_size)
        length = len(row.input_ids)
        ids.append(row.input_ids)
        positions.append(row.position_ids)
        until.append(np.full(length, start + length))
        # The logits at a position predict the next token, so a sample's first token is never a target.
        places = np.flatnonzero(row.weights[1:])
        target_positions.append(start + places)
        target_ids.append(row.input_ids[places + 1])
        target_weights.append(row.weights[places + 1])
        images.extend(image_places[image.key] for image in sample.images)
        start += length
    running = np.arange(start)[None]
    return Pack(
        input_ids=torch.from_numpy(np.concatenate(ids))[None],
        position_ids=torch.from_numpy(np.concatenate([running, np.concatenate(positions, axis=1)]))[:, None],
        visible_until=torch.from_numpy(np.concatenate(until)),
        target_positions=torch.from_numpy(np.concatenate(target_positions)),
        target_ids=torch.from_numpy(np.concatenate(target_ids)),
        target_weights=torch.from_numpy(np.concatenate(target_weights)),
        images=tuple(images),
        is_causal=len(ids) == 1,
    )
