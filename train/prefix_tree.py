"""Samples with an identical prefix of tokens and images share it: a forest, each stretch of tokens standing once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from train.sample import Sample

# A shorter stretch of text without an image is repeated: sharing it would tie unrelated samples together in the mask
# and save next to nothing.
MIN_SHARED_TOKENS = 32

Symbols = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Node:
    """A stretch of tokens that some samples have in common.

    Attributes:
        samples: indices of the samples that go through it, into the list that the tree was built from.
        start, stop: its stretch in each of those samples, counted in tokens before placeholders are widened.
        children: what follows, each for some of the samples.
    """

    samples: tuple[int, ...]
    start: int
    stop: int
    children: tuple[Node, ...]


def symbols_of(samples: Sequence[Sample], image_token_id: int) -> list[Symbols]:
    """Each sample as numbers that are equal exactly where tokens, and images at placeholders, are equal."""
    images: dict[str, int] = {}
    found = []
    for sample in samples:
        numbers = sample.text.input_ids.astype(np.int64)
        places = np.flatnonzero(numbers == image_token_id)
        # Negative numbers stand for images, so no token can be mistaken for one.
        numbers[places] = [-1 - images.setdefault(image.key, len(images)) for image in sample.images]
        found.append(numbers)
    return found


def sharing_order(symbols: Sequence[Symbols]) -> list[int]:
    """Indices sorted so that samples with a common prefix stand together; equal ones keep their order."""
    # Big-endian bytes of shifted numbers compare as the numbers do.
    keys = [(numbers + 2**40).astype(">i8").tobytes() for numbers in symbols]
    return sorted(range(len(symbols)), key=keys.__getitem__)


def shared_length(first: Symbols, second: Symbols) -> int:
    """Tokens of the longest common prefix that is worth sharing; 0 if it is too short and holds no image."""
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    common = int(different[0]) if len(different) else length
    worth = common >= MIN_SHARED_TOKENS or bool((first[:common] < 0).any())
    return common if worth else 0


def build_forest(symbols: Sequence[Symbols], order: Sequence[int], *, share: bool = True) -> tuple[Node, ...]:
    """The prefix forest over the samples in `order`.

    Args:
        symbols: of all samples; `order` says which of them, neighbours sharing prefixes (see sharing_order).
        share: without it each sample is a tree of its own.
    """
    common = [shared_length(symbols[a], symbols[b]) if share else 0 for a, b in itertools.pairwise(order)]
    return _grow(symbols, list(order), common, 0)


def _grow(symbols: Sequence[Symbols], order: list[int], common: list[int], start: int) -> tuple[Node, ...]:
    """Nodes for samples that agree up to `start`; `common[i]` is what order[i] and order[i + 1] share."""
    nodes = []
    first = 0
    for last in range(len(order)):
        if last < len(common) and common[last] > start:
            continue
        members, inner = order[first : last + 1], common[first:last]
        stop = min(inner, default=len(symbols[members[0]]))
        # A sample that ends where the others go on needs no node of its own.
        longer = [i for i, member in enumerate(members) if len(symbols[member]) > stop]
        children: tuple[Node, ...] = ()
        if longer and inner:
            kept = [members[i] for i in longer]
            between = [min(inner[a:b]) for a, b in itertools.pairwise(longer)]
            children = _grow(symbols, kept, between, stop)
        nodes.append(Node(tuple(members), start, stop, children))
        first = last + 1
    return tuple(nodes)


def forest_tokens(forest: Sequence[Node], lengths: Sequence[npt.NDArray[np.int64]]) -> int:
    """Tokens of a forest once placeholders are widened.

    Args:
        lengths: per sample, (S,) the tokens that each of its tokens becomes.
    """
    return sum(
        int(lengths[node.samples[0]][node.start : node.stop].sum()) + forest_tokens(node.children, lengths)
        for node in forest
    )
