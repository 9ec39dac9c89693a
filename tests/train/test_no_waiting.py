"""A step's rows go forward and backward without the host reading a number back from the device.

On tensors without contents torch refuses every operation that would need one: `.item()`, masks as indices, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

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
from train.sample import SampleImage, make_sample

MERGE, GRID = 2, (1, 8, 12)
TOKENS = 8 * 12 // MERGE**2


@pytest.fixture
def model(tiny: Path) -> Any:
    """The tiny model under an adapter, ready for training."""
    config = TrainConfig(precision="fp32", lora=LoraConfig(r=4))
    loaded = load_language_model(ModelConfig(name_or_path=str(tiny)), config, torch.device("cpu"))
    return add_lora(loaded, config.lora, seed=1).train()


def _pack(token: int) -> Pack:
    """Three questions on one image and one on another, answered in two tokens each."""
    import numpy as np

    samples = []
    for image in (0, 0, 0, 1):
        ids = np.array([token, 5, 6 + len(samples), 7, 8], dtype=np.int32)
        weights = np.array([0, 0, 0, 1, 1], dtype=np.float32)
        ref = SampleImage(f"{image}", GRID, ImageRef(f"{image}"))
        samples.append(make_sample(EncodedText(ids, weights, ()), (ref,), merge_size=MERGE, source="drawn"))
    symbols = symbols_of(samples, token)
    return build_pack(
        samples,
        symbols,
        sharing_order(symbols),
        {"0": 0, "1": 1},
        image_token_id=token,
        merge_size=MERGE,
        share=True,
    )


def _without_contents(model: Any, run: Callable[[Pack, Sequence[VisionFeatures]], torch.Tensor]) -> torch.Tensor:
    pack = _pack(model.config.image_token_id)
    mask = pack.attention_mask()
    assert mask is not None
    features = [VisionFeatures(torch.randn(TOKENS, 128), torch.randn(3, TOKENS, 128), torch.tensor(GRID))] * 2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        empty = Pack(
            **{
                name: mode.from_tensor(value) if isinstance(value := getattr(pack, name), torch.Tensor) else value
                for name in Pack.__dataclass_fields__
            }
        )
        hollow = [
            VisionFeatures(mode.from_tensor(f.image_embeds), mode.from_tensor(f.deepstack_features), f.image_grid_thw)
            for f in features
        ]
        return run(empty, hollow)


def test_forward_and_backward_read_nothing_back(model: Any) -> None:
    def step(pack: Pack, features: Sequence[VisionFeatures]) -> torch.Tensor:
        loss = pack_loss(model, pack, features, scale=0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert _without_contents(model, step).shape == ()


def test_the_stock_way_would_be_caught(model: Any) -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        _without_contents(model, lambda pack, features: pack_logits(model, pack, features))
