"""A pack against its samples one by one, and samples of a pack against each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.features import features_on
from train.inputs import Inputs
from train.loss import pack_logits, pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.sample import Sample

from .conftest import job_of, under_adapter

CPU = torch.device("cpu")


@pytest.fixture
def setup(data_dir: Path, make_config: Callable[..., PipelineConfig]) -> tuple[Any, Inputs, list[Sample]]:
    """A model with a live adapter, and samples: several images, one twice, none, many turns, system turns."""
    config = make_config({"train": str(data_dir / "sharegpt.json")})
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    inputs = Inputs.open(job_of(config))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent()).samples
    model = under_adapter(load_language_model(config.model, config.train, CPU))
    return model, inputs, samples


def _pack(samples: list[Sample], inputs: Inputs, *, share: bool = False) -> tuple[Pack, list[Any]]:
    distinct = {image.key: image for sample in samples for image in sample.images}
    places = {key: place for place, key in enumerate(distinct)}
    symbols = symbols_of(samples, inputs.image_token_id)
    pack = build_pack(
        samples,
        symbols,
        sharing_order(symbols) if share else range(len(samples)),
        places,
        image_token_id=inputs.image_token_id,
        merge_size=inputs.processor.merge_size,
        share=share,
    )
    return pack, features_on(CPU, [inputs.source.load(image) for image in distinct.values()], None)


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def test_pack_equals_one_by_one(setup: tuple[Any, Inputs, list[Sample]]) -> None:
    model, inputs, samples = setup
    pack, features = _pack(samples, inputs)
    assert not pack.is_causal
    loss = pack_loss(model, pack, features)
    loss.backward()
    together = _gradients(model)
    alone = torch.zeros(())
    for sample in samples:
        single, its_features = _pack([sample], inputs)
        assert single.is_causal
        part = pack_loss(model, single, its_features)
        part.backward()
        alone += part.detach()
    torch.testing.assert_close(loss.detach(), alone, rtol=2e-6, atol=0)
    for name, gradient in _gradients(model).items():
        scale = gradient.abs().max()
        assert (together[name] - gradient).abs().max() <= 2e-5 * scale, name


def test_changing_one_sample_changes_no_other(setup: tuple[Any, Inputs, list[Sample]]) -> None:
    model, inputs, samples = setup
    model.eval()
    pack, features = _pack(samples, inputs)
    everywhere = replace(pack, target_positions=torch.arange(pack.input_ids.shape[1]))
    with torch.no_grad():
        before = pack_logits(model, everywhere, features)
    ends = torch.unique(pack.visible_until).tolist()
    for number in (0, 2, len(samples) - 1):
        start, stop = ([0, *ends])[number], ends[number]
        text = (pack.input_ids[0, start:stop] != inputs.image_token_id).nonzero()[:, 0] + start
        changed = pack.input_ids.clone()
        changed[0, text] = (changed[0, text] + 7) % 1000
        with torch.no_grad():
            after = pack_logits(model, replace(everywhere, input_ids=changed), features)
        same = (before == after).all(dim=1)
        assert not same[start:stop].any()
        assert same[:start].all()
        assert same[stop:].all()


def test_features_reach_their_own_sample_only(setup: tuple[Any, Inputs, list[Sample]]) -> None:
    model, inputs, samples = setup
    model.eval()
    pack, features = _pack(samples, inputs)
    everywhere = replace(pack, target_positions=torch.arange(pack.input_ids.shape[1]))
    with torch.no_grad():
        before = pack_logits(model, everywhere, features)
        other = replace(features[0], image_embeds=features[0].image_embeds.flip(0))
        after = pack_logits(model, everywhere, [other, *features[1:]])
    end = int(pack.visible_until[0])
    assert not torch.equal(before[:end], after[:end])
    assert torch.equal(before[end:], after[end:])


def test_positions_are_the_stock_models(setup: tuple[Any, Inputs, list[Sample]], tiny: Path) -> None:
    from transformers import AutoModelForImageTextToText

    _, inputs, samples = setup
    stock = AutoModelForImageTextToText.from_pretrained(tiny).model
    for sample in samples:
        pack, _ = _pack([sample], inputs)
        grids = torch.tensor([image.grid for image in sample.images]).reshape(-1, 3)
        kinds = (pack.input_ids == inputs.image_token_id).int()
        expected, _ = stock.get_rope_index(pack.input_ids, kinds, image_grid_thw=grids if len(grids) else None)
        assert torch.equal(pack.position_ids[1:], expected)
        assert np.array_equal(pack.position_ids[0, 0].numpy(), np.arange(pack.input_ids.shape[1]))
