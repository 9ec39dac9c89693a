"""One sample, ready to be packed: placeholders widened to the image's tokens, M-RoPE positions computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.records import ImageRef
from train.chat import EncodedText

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image of a sample.

    Attributes:
        key: its entry in the cache; equal keys are equal images.
        grid: (t, h, w) in patches.
        ref: where its bytes are, for the live path.
    """

    key: str
    grid: Grid
    ref: ImageRef


@dataclass(frozen=True, slots=True)
class Sample:
    """A record as the trainer keeps it: compact, without widened placeholders.

    Attributes:
        text: tokens and loss weights.
        images: one for each placeholder, in order.
        num_tokens: length once widened.
        total_weight: sum of the loss weights.
        source: file and line of the record.
    """

    text: EncodedText
    images: tuple[SampleImage, ...]
    num_tokens: int
    total_weight: float
    source: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sample with widened placeholders.

    Attributes:
        input_ids: (S,) int64.
        position_ids: (3, S) int64, M-RoPE positions (t, h, w), starting at 0.
        weights: (S,) float32, factor on the loss of predicting this token.
    """

    input_ids: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def make_sample(text: EncodedText, images: tuple[SampleImage, ...], *, merge_size: int, source: str) -> Sample:
    """Combine a record's tokens with its images, one for each placeholder."""
    widened = sum(num_image_tokens(image.grid, merge_size) for image in images)
    return Sample(
        text=text,
        images=images,
        num_tokens=len(text.input_ids) - len(images) + widened,
        total_weight=float(text.weights.sum()),
        source=source,
    )


def num_image_tokens(grid: Grid, merge_size: int) -> int:
    """Placeholders that an image of this grid takes."""
    t, h, w = grid
    return t * h * w // merge_size**2


def widths(sample: Sample, *, image_token_id: int, merge_size: int) -> npt.NDArray[np.int64]:
    """(S,) int64, how many tokens each token of the compact text becomes: a placeholder its image's, others one."""
    repeats = np.ones(len(sample.text.input_ids), dtype=np.int64)
    places = np.flatnonzero(sample.text.input_ids == image_token_id)
    repeats[places] = [num_image_tokens(image.grid, merge_size) for image in sample.images]
    return repeats


def widen(sample: Sample, *, image_token_id: int, merge_size: int) -> Sequence:
    """Repeat each placeholder once for each merged token of its image and compute M-RoPE positions.

    Text advances all three positions by one; an image of grid (t, h, w) takes t x h/merge x w/merge positions from
    its start on, and text goes on behind the largest of them. Source: Qwen2-VL (arXiv 2409.12191, section 2.1);
    the same numbers as transformers' Qwen3VLModel.get_rope_index.
    """
    ids = sample.text.input_ids
    places = np.flatnonzero(ids == image_token_id)
    repeats = widths(sample, image_token_id=image_token_id, merge_size=merge_size)
    advance = np.ones(len(ids), dtype=np.int64)
    for place, image in zip(places, sample.images, strict=True):
        _, h, w = image.grid
        advance[place] = max(h, w) // merge_size
    starts = np.cumsum(advance) - advance
    offsets = np.cumsum(repeats) - repeats
    position_ids = np.tile(np.repeat(starts, repeats), (3, 1))
    for place, image in zip(places, sample.images, strict=True):
        t, h, w = image.grid
        block = np.indices((t, h // merge_size, w // merge_size)).reshape(3, -1)
        position_ids[:, offsets[place] : offsets[place] + repeats[place]] += block
    return Sequence(
        input_ids=np.repeat(ids, repeats).astype(np.int64),
        position_ids=position_ids,
        weights=np.repeat(sample.text.weights, repeats),
    )
