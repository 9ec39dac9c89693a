"""Shared prefixes against the same samples one by one: loss and every gradient, over random forests of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cache.config import ModelConfig
from cache.features import VisionFeatures
from cache.records import ImageRef
from train.chat import EncodedText
from train.config import LoraConfig, TrainConfig
from train.cut import Costs, balanced_shares, runs_within
from train.lora import add_lora
from train.loss import pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import Node, build_forest, sharing_order, symbols_of
from train.sample import Sample, SampleImage, make_sample

GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6), "c": (1, 6, 2)}
MERGE = 2
IMAGE = -1  # stands for a placeholder in the strategies below; replaced by the model's token


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    config = TrainConfig(precision="fp32", lora=LoraConfig(r=4))
    loaded = load_language_model(ModelConfig(name_or_path=str(tiny)), config, torch.device("cpu"))
    wrapped = add_lora(loaded, config.lora, seed=1)
    with torch.no_grad():
        for parameter in (p for p in wrapped.parameters() if p.requires_grad):
            parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    return wrapped.train()


def _features(key: str) -> VisionFeatures:
    generator = torch.Generator().manual_seed(ord(key))
    grid = GRIDS[key]
    count = grid[0] * grid[1] * grid[2] // MERGE**2
    return VisionFeatures(
        torch.randn(count, 128, generator=generator),
        torch.randn(3, count, 128, generator=generator),
        torch.tensor(grid),
    )


Piece = tuple[Any, float]  # (token, or the key of an image), weight

text_pieces = st.lists(st.tuples(st.integers(5, 12), st.sampled_from([0.0, 0.0, 1.0, 0.5])), min_size=1, max_size=6)
image_pieces = st.sampled_from(sorted(GRIDS)).map(lambda key: [(key, 0.0)])
long_text = st.integers(5, 12).map(lambda token: [(token, 0.0)] * 33)
stretches = st.one_of(text_pieces, image_pieces, long_text)


@st.composite
def forests(draw: st.DrawFn) -> list[list[Piece]]:
    """Samples that grow from each other: each new one goes on from a random cut of an earlier one, or starts anew."""
    samples: list[list[Piece]] = []
    for _ in range(draw(st.integers(1, 6))):
        head: list[Piece] = []
        if samples and draw(st.integers(0, 3)):
            parent = draw(st.sampled_from(samples))
            head = parent[: draw(st.integers(0, len(parent)))]
        tail = [piece for stretch in draw(st.lists(stretches, max_size=3)) for piece in stretch]
        whole = [*head, *tail, *draw(text_pieces)]
        samples.append([*whole, (draw(st.integers(5, 12)), 1.0)])
    return samples


def _sample(pieces: Sequence[Piece], image_token: int) -> Sample:
    images = tuple(SampleImage(p, GRIDS[p], ImageRef(p)) for p, _ in pieces if isinstance(p, str))
    ids = np.array([image_token if isinstance(p, str) else p for p, _ in pieces], dtype=np.int32)
    weights = np.array([w for _, w in pieces], dtype=np.float32)
    return make_sample(EncodedText(ids, weights, ()), images, merge_size=MERGE, source="drawn")


def _pack(samples: list[Sample], image_token: int, *, share: bool) -> tuple[Pack, list[VisionFeatures]]:
    keys = sorted({image.key for sample in samples for image in sample.images})
    symbols = symbols_of(samples, image_token)
    order = sharing_order(symbols) if share else list(range(len(samples)))
    places = {key: place for place, key in enumerate(keys)}
    pack = build_pack(samples, symbols, order, places, image_token_id=image_token, merge_size=MERGE, share=share)
    return pack, [_features(key) for key in keys]


def _loss_and_gradients(model: Any, packs: list[tuple[Pack, list[VisionFeatures]]]) -> tuple[float, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    total = 0.0
    for pack, features in packs:
        loss = pack_loss(model, pack, features)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@given(drawn=forests())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sharing_changes_neither_loss_nor_gradients(drawn: list[list[Piece]], model: Any) -> None:
    token = model.config.image_token_id
    samples = [_sample(pieces, token) for pieces in drawn]
    shared, gradients = _loss_and_gradients(model, [_pack(samples, token, share=True)])
    alone, wanted = _loss_and_gradients(model, [_pack([sample], token, share=False) for sample in samples])
    assert shared == pytest.approx(alone, rel=5e-6)
    # A position that sees only itself has no gradient in its query and key but rounding, hence the second term.
    largest = max(gradient.abs().max() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).abs().max() <= 5e-5 * gradient.abs().max() + 1e-6 * largest, name


@given(drawn=forests())
@settings(max_examples=200, deadline=None)
def test_forest_holds_each_sample_once_and_whole(drawn: list[list[Piece]]) -> None:
    samples = [_sample(pieces, 7777) for pieces in drawn]
    symbols = symbols_of(samples, 7777)
    forest = build_forest(symbols, sharing_order(symbols))
    spelled: dict[int, list[int]] = {index: [] for index in range(len(samples))}
    tokens = 0

    def walk(node: Node) -> None:
        nonlocal tokens
        tokens += node.stop - node.start
        for index in node.samples:
            assert len(spelled[index]) == node.start
            spelled[index] += symbols[index][node.start : node.stop].tolist()
        for child in node.children:
            assert set(child.samples) <= set(node.samples)
            walk(child)

    for root in forest:
        walk(root)
    assert all(spelled[index] == symbols[index].tolist() for index in spelled)
    assert tokens <= sum(len(numbers) for numbers in symbols)


@given(drawn=forests(), budget=st.integers(1, 80), share=st.booleans(), count=st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_cutting_keeps_every_sample_and_the_budget(
    drawn: list[list[Piece]], budget: int, share: bool, count: int
) -> None:
    samples = [_sample(pieces, 7777) for pieces in drawn]
    symbols = symbols_of(samples, 7777)
    order = sharing_order(symbols) if share else list(range(len(samples)))
    settings_ = {"image_token_id": 7777, "merge_size": MERGE}
    costs = Costs.of(samples, symbols, order, share=share, **settings_)
    shares = balanced_shares(costs, count)
    assert [place for part in shares for place in part] == list(range(len(samples)))
    assert len(shares) <= count

    def length(run: range) -> int:
        places = dict.fromkeys(GRIDS, 0)
        members = [order[place] for place in run]
        return build_pack(samples, symbols, members, places, share=share, **settings_).input_ids.shape[1]

    if count == 1 or len(samples) == 1:
        assert shares == [range(len(samples))]
    else:  # no cut in two is better than the one that was chosen
        longest = max(length(part) for part in balanced_shares(costs, 2))
        halves = [max(length(range(cut)), length(range(cut, len(samples)))) for cut in range(1, len(samples))]
        assert longest <= min([*halves, length(range(len(samples)))])
    for part in shares:
        runs = runs_within(costs, part, budget)
        assert [place for run in runs for place in run] == list(part)
        assert all(length(run) <= budget or len(run) == 1 for run in runs)


def test_what_is_worth_sharing() -> None:
    picture = [("a", 0.0), (5, 0.0), (6, 1.0)]
    other = [("b", 0.0), (5, 0.0), (6, 1.0)]
    words = [(7, 0.0), (8, 0.0), (5, 1.0)]
    samples = [_sample(pieces, 7777) for pieces in (picture, other, words, [*picture[:2], (9, 1.0)], words)]
    symbols = symbols_of(samples, 7777)
    order = sharing_order(symbols)
    forest = build_forest(symbols, order)
    groups = sorted(sorted(root.samples) for root in forest)
    # The same image is shared; another image of the same tokens, and short texts, are not.
    assert groups == [[0, 3], [1], [2], [4]]
    (tree,) = [root for root in forest if len(root.samples) == 2]
    assert (tree.start, tree.stop, len(tree.children)) == (0, 2, 2)
