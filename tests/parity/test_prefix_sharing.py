"""Shared, packed rows of cached features against the stock model: one sample at a time, from pixels, random forests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from cache.config import CacheConfig, ModelConfig
from cache.features import VisionFeatures
from cache.records import ImageRef
from cache.vision_tower import VisionTower
from train.chat import EncodedText
from train.config import TrainConfig
from train.cut import Costs, balanced_shares, runs_within
from train.features import CachedImage, FeatureSource, StepImage, features_on
from train.loss import pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import Node, build_forest, sharing_order, symbols_of
from train.sample import Sample, SampleImage, make_sample
from train.step import Step
from train.step_dataset import StepDataset

from .conftest import Stock, under_adapter

GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6), "c": (1, 6, 2)}
MERGE = 2
CPU = torch.device("cpu")


def _pixels(key: str) -> torch.Tensor:
    """(P, 3 * 2 * 16 * 16), as the processor gives them."""
    return torch.randn(int(np.prod(GRIDS[key])), 1536, generator=torch.Generator().manual_seed(ord(key)))


@pytest.fixture(scope="module")
def stock(tiny: Path) -> Any:
    """The stock model, tower included."""
    return under_adapter(Stock.load(tiny, 128 * 128).model.requires_grad_(False))


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    """What trains."""
    config = TrainConfig(precision="fp32")
    return under_adapter(load_language_model(ModelConfig(name_or_path=str(tiny)), config, CPU))


class _Features(FeatureSource):
    """What the tower gives for the pixels, by itself."""

    bytes_per_token = 0

    def __init__(self, checkpoint: Path) -> None:
        tower = VisionTower.load(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(dtype="float32", device="cpu"))
        self._held: dict[str, VisionFeatures] = {
            key: tower.encode([_pixels(key)], [torch.tensor(grid)])[0] for key, grid in GRIDS.items()
        }

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        return CachedImage(self._held[image.key], torch.float32)


@pytest.fixture(scope="module")
def features(tiny: Path) -> FeatureSource:
    """Of the drawn images."""
    return _Features(tiny)


Piece = tuple[Any, float]  # (token, or the key of an image), weight

text_pieces = st.lists(st.tuples(st.integers(5, 12), st.sampled_from([0.0, 0.0, 1.0, 0.5])), min_size=1, max_size=6)
image_pieces = st.sampled_from(sorted(GRIDS)).map(lambda key: [(4, 0.0), (key, 0.0)])  # as behind <|vision_start|>
long_text = st.integers(5, 12).map(lambda token: [(token, 0.0)] * 33)
stretches = st.one_of(image_pieces, text_pieces, image_pieces, long_text)


@st.composite
def forests(draw: st.DrawFn, *, fewest: int = 1) -> list[list[Piece]]:
    """Samples that grow from each other: each new one goes on from a random cut of an earlier one, or starts anew."""
    samples: list[list[Piece]] = []
    for _ in range(draw(st.integers(fewest, 6))):
        if samples and draw(st.integers(0, 5)):
            parent = draw(st.sampled_from(samples))
            head = parent[: draw(st.integers(len(parent) // 2, len(parent)))]
        else:
            head = draw(stretches)
        tail = [piece for stretch in draw(st.lists(stretches, max_size=2)) for piece in stretch]
        whole = [*head, *tail, *draw(text_pieces)]
        samples.append([*whole, (draw(st.integers(5, 12)), 1.0)])
    return samples


def _sample(pieces: Sequence[Piece], image_token: int) -> Sample:
    images = tuple(SampleImage(p, GRIDS[p], ImageRef(p)) for p, _ in pieces if isinstance(p, str))
    ids = np.array([image_token if isinstance(p, str) else p for p, _ in pieces], dtype=np.int32)
    weights = np.array([w for _, w in pieces], dtype=np.float32)
    return make_sample(EncodedText(ids, weights, ()), images, merge_size=MERGE, source="drawn")


def _step(samples: list[Sample], features: FeatureSource, image_token: int, budget: int) -> Step:
    return StepDataset(
        samples,
        features,
        effective_batch_size=len(samples),
        tokens_per_pack=budget,
        image_token_id=image_token,
        merge_size=MERGE,
        seed=None,
    )[0, 0]


def _ours(model: Any, step: Step) -> float:
    features = features_on(CPU, step.images, None)
    total = 0.0
    for pack in step.packs:
        loss = pack_loss(model, pack, features)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _oracle(stock: Any, samples: Sequence[list[Piece]]) -> float:
    """Each sample by itself through the stock forward: its own widening, positions, tower and logits."""
    token, total = stock.config.image_token_id, 0.0
    for pieces in samples:
        images = [piece for piece, _ in pieces if isinstance(piece, str)]
        repeats = [int(np.prod(GRIDS[piece])) // MERGE**2 if isinstance(piece, str) else 1 for piece, _ in pieces]
        narrow = torch.tensor([token if isinstance(piece, str) else piece for piece, _ in pieces])
        ids = narrow.repeat_interleave(torch.tensor(repeats))[None]
        weights = torch.tensor([weight for _, weight in pieces]).repeat_interleave(torch.tensor(repeats))
        vision = {}
        if images:
            grids = torch.tensor([GRIDS[image] for image in images])
            vision = {"pixel_values": torch.cat([_pixels(image) for image in images]), "image_grid_thw": grids}
        logits = stock(input_ids=ids, mm_token_type_ids=(ids == token).int(), **vision, use_cache=False).logits
        loss = (cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none") * weights[1:]).sum()
        loss.backward()
        total += loss.item()
    return total


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _depth(pack: Pack) -> int:
    """The most stretches of the tree, one behind the other, that a token sees."""
    until = pack.visible_until.tolist()
    return max(len({end for end in until[: place + 1] if end > place}) for place in range(len(until)))


@dataclass
class _Drawn:
    """What the examples held."""

    depth: int = 0
    images_of_a_sample: int = 0
    rows: int = 0
    text_beside_images: bool = False
    tokens_saved: int = 0

    def note(self, samples: list[Sample], step: Step) -> None:
        self.depth = max(self.depth, *(_depth(pack) for pack in step.packs))
        self.images_of_a_sample = max(self.images_of_a_sample, *(len({i.key for i in s.images}) for s in samples))
        self.rows = max(self.rows, len(step.packs))
        self.text_beside_images |= len(step.packs) == 1 and len({bool(sample.images) for sample in samples}) == 2
        self.tokens_saved += sum(s.num_tokens for s in samples) - sum(p.input_ids.shape[1] for p in step.packs)


def test_loss_and_every_gradient_are_those_of_the_stock_model(stock: Any, model: Any, features: FeatureSource) -> None:
    seen = _Drawn()

    @given(drawn=forests(fewest=4), budget=st.sampled_from([10**6, 10**6, 100, 1]))
    @settings(max_examples=14, phases=[Phase.generate])  # making a failure small would take minutes
    def compare(drawn: list[list[Piece]], budget: int) -> None:
        token = model.config.image_token_id
        samples = [_sample(pieces, token) for pieces in drawn]
        step = _step(samples, features, token, budget)
        seen.note(samples, step)
        assert _ours(model, step) == pytest.approx(_oracle(stock, drawn), rel=5e-6)
        found, wanted = _gradients(model), _gradients(stock)
        assert found.keys() == wanted.keys()
        # A position that sees only itself has no gradient in its query and key but rounding, hence the second term.
        largest = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert (found[name] - gradient).abs().max() <= 5e-5 * gradient.abs().max() + 1e-6 * largest, name

    compare()
    print(seen)
    assert seen.depth >= 3
    assert seen.images_of_a_sample >= 2
    assert seen.rows >= 3
    assert seen.text_beside_images
    assert seen.tokens_saved > 100


@given(drawn=forests())
@settings(max_examples=100)
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
@settings(max_examples=100)
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
