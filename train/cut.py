"""Cuts the samples of a step into processes' shares and rows. Never changes what is in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from train.prefix_tree import Symbols, shared_length
from train.sample import Sample, widths


@dataclass(frozen=True, slots=True)
class Costs:
    """Tokens that each sample of an ordered list takes in a row.

    Attributes:
        whole: at the beginning of a row.
        added: behind the sample before it in the list, whose prefix it shares.
    """

    whole: tuple[int, ...]
    added: tuple[int, ...]

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        symbols: Sequence[Symbols],
        order: Sequence[int],
        *,
        image_token_id: int,
        merge_size: int,
        share: bool,
    ) -> Costs:
        """Costs of the samples in `order`, neighbours sharing prefixes."""
        whole, added = [], []
        for place, index in enumerate(order):
            tokens = widths(samples[index], image_token_id=image_token_id, merge_size=merge_size)
            common = shared_length(symbols[order[place - 1]], symbols[index]) if place and share else 0
            whole.append(int(tokens.sum()))
            added.append(int(tokens[common:].sum()))
        return cls(tuple(whole), tuple(added))


def runs_within(costs: Costs, places: range, tokens: int) -> list[range]:
    """Cut a stretch of the list into runs of at most `tokens`; a longer sample has a run of its own."""
    runs: list[range] = []
    start, held = places.start, 0
    for place in places:
        if place > start and held + costs.added[place] > tokens:
            runs.append(range(start, place))
            start = place
        held = costs.whole[place] if place == start else held + costs.added[place]
    if len(places):
        runs.append(range(start, places.stop))
    return runs


def balanced_shares(costs: Costs, count: int) -> list[range]:
    """Cut the list into at most `count` runs whose longest is as short as can be, by bisection over that length."""
    everything = range(len(costs.whole))
    low, high = max(costs.whole, default=0), sum(costs.whole)
    while low < high:
        middle = (low + high) // 2
        if len(runs_within(costs, everything, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return runs_within(costs, everything, high)


def length_of(costs: Costs, places: range) -> int:
    """Tokens of a stretch of the list in one row."""
    return costs.whole[places.start] + sum(costs.added[place] for place in places[1:])
