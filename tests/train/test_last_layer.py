"""The last layer's second half at the targets alone, against the stock forward over the whole row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from cache.config import ModelConfig
from cache.features import VisionFeatures
from cache.records import ImageRef
from train.chat import EncodedText
from train.config import LoraConfig, TrainConfig
from train.lora import add_lora
from train.loss import pack_logits, pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.recompute import recomputing
from train.sample import SampleImage, make_sample

MERGE, GRID = 2, (1, 4, 6)
TOKENS = 4 * 6 // MERGE**2


@pytest.fixture(params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tiny: Path, tiny_moe: Path) -> Any:
    """A tiny model under an adapter that does something."""
    config = TrainConfig(precision="fp32", lora=LoraConfig(r=4))
    checkpoint = {"dense": tiny, "moe": tiny_moe}[request.param]
    loaded = load_language_model(ModelConfig(name_or_path=str(checkpoint)), config, torch.device("cpu"))
    wrapped = add_lora(loaded, config.lora, seed=1).train()
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in wrapped.parameters() if p.requires_grad):
            parameter.normal_(0, 0.05, generator=dice)
    return wrapped


def _pack(token: int) -> Pack:
    """Three questions on one image, answered in two tokens each."""
    ref = SampleImage("0", GRID, ImageRef("0"))
    samples = []
    for number in range(3):
        ids = np.array([token, 5, 6 + number, 7, 8], dtype=np.int32)
        weights = np.array([0, 0, 0, 1, 0.5], dtype=np.float32)
        samples.append(make_sample(EncodedText(ids, weights, ()), (ref,), merge_size=MERGE, source="drawn"))
    symbols = symbols_of(samples, token)
    order = sharing_order(symbols)
    return build_pack(samples, symbols, order, {"0": 0}, image_token_id=token, merge_size=MERGE, share=True)


def _features(model: Any, levels: int = 3) -> list[VisionFeatures]:
    width = model.config.text_config.hidden_size
    dice = torch.Generator().manual_seed(7)
    main, deepstack = (torch.randn(*shape, generator=dice) for shape in ((TOKENS, width), (levels, TOKENS, width)))
    return [VisionFeatures(main, deepstack, torch.tensor(GRID))]


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _compare(model: Any, features: list[VisionFeatures]) -> None:
    pack = _pack(model.config.image_token_id)
    logits = pack_logits(model, pack, features)
    right = (cross_entropy(logits, pack.target_ids, reduction="none") * pack.target_weights).sum()
    right.backward()
    wanted = _gradients(model)

    loss = pack_loss(model, pack, features)
    loss.backward()  # type: ignore[no-untyped-call]
    found = _gradients(model)

    torch.testing.assert_close(loss, right, rtol=1e-6, atol=0)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize("recompute", [False, True])
def test_loss_and_gradients_are_those_of_the_stock_forward(model: Any, recompute: bool) -> None:
    recomputing(model, recompute)
    _compare(model, _features(model))


def test_features_that_enter_behind_the_last_layer_are_not_lost(model: Any) -> None:
    del model.get_base_model().model.language_model.layers[1:-1]

    _compare(model, _features(model, levels=2))


def test_only_the_last_layer_leaves_positions_out(model: Any) -> None:
    rows: dict[int, int] = {}
    layers = model.get_base_model().model.language_model.layers
    for number, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda _, given, __, number=number: rows.update({number: given[0].shape[1]}))
    pack = _pack(model.config.image_token_id)

    pack_loss(model, pack, _features(model))

    whole, read = pack.input_ids.shape[1], len(pack.target_positions)
    assert read < whole
    assert list(rows.values()) == [whole] * (len(layers) - 1) + [read]
