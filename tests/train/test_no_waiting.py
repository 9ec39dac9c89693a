"""A step's rows go forward and backward without the host reading a number back from the device.

On tensors without contents torch refuses every operation that would need one: `.item()`, masks as indices, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from cache import flash
from cache.config import ModelConfig
from cache.features import VisionFeatures
from cache.quantize import quantize
from cache.records import ImageRef
from train.arguments import training_arguments
from train.attention import Kind, register
from train.chat import EncodedText, StageSpan
from train.config import LoraConfig, TrainConfig
from train.features import CachedImage, FeatureSource, StepImage
from train.lora import add_lora
from train.loss import pack_logits, pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.sample import Sample, SampleImage, make_sample
from train.stage_losses import StageLosses
from train.step_dataset import StepDataset
from train.trainer import StepTrainer

MERGE, GRID = 2, (1, 8, 12)
TOKENS = 8 * 12 // MERGE**2


@pytest.fixture
def model(tiny: Path) -> Any:
    """The tiny model under an adapter, ready for training."""
    config = TrainConfig(precision="fp32", lora=LoraConfig(r=4))
    loaded = load_language_model(ModelConfig(name_or_path=str(tiny)), config, torch.device("cpu"))
    return add_lora(loaded, config.lora, seed=1).train()


def _staged(token: int) -> list[Sample]:
    """Three questions on one image and one on another, answered in two stages of a token each."""
    samples = []
    for number, image in enumerate((0, 0, 0, 1)):
        ids = np.array([token, 5, 6 + number, 7, 8], dtype=np.int32)
        weights = np.array([0, 0, 0, 1, 1], dtype=np.float32)
        text = EncodedText(ids, weights, (), (StageSpan("observe", 3, 4), StageSpan("answer", 4, 5)))
        ref = SampleImage(f"{image}", GRID, ImageRef(f"{image}"))
        samples.append(make_sample(text, (ref,), merge_size=MERGE, source="drawn"))
    return samples


def _pack(token: int) -> Pack:
    """All of them in one row."""
    samples = _staged(token)
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


def _hollow(value: Any, mode: FakeTensorMode) -> Any:
    """A copy whose tensors are without contents."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, tuple):
        return tuple(_hollow(part, mode) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _hollow(getattr(value, field.name), mode) for field in fields(value)})
    return value


def _without_contents(model: Any, run: Callable[[Pack, Sequence[VisionFeatures]], torch.Tensor]) -> torch.Tensor:
    pack = _pack(model.config.image_token_id)
    mask = pack.attention_mask()
    assert mask is not None
    features = (VisionFeatures(torch.randn(TOKENS, 128), torch.randn(3, TOKENS, 128), torch.tensor(GRID)),) * 2
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return run(_hollow(pack, mode), _hollow(features, mode))


def test_forward_and_backward_read_nothing_back(model: Any) -> None:
    def step(pack: Pack, features: Sequence[VisionFeatures]) -> torch.Tensor:
        loss = pack_loss(model, pack, features, scale=0.5)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert _without_contents(model, step).shape == ()


def test_the_stock_way_would_be_caught(model: Any) -> None:
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        _without_contents(model, lambda pack, features: pack_logits(model, pack, features))


class _Quantized(FeatureSource):
    """Features in 8 bits, as a cache may hold them."""

    bytes_per_token = 0

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        drawn = VisionFeatures(torch.randn(TOKENS, 128), torch.randn(3, TOKENS, 128), torch.tensor(GRID))
        return CachedImage(quantize(drawn, "float8_e4m3"), torch.float32)


@pytest.mark.parametrize("kind", ["sdpa", "flash"])
def test_a_whole_training_step_reads_nothing_back(
    model: Any, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StepTrainer.training_step: features in 8 bits, losses of stages, several rows, a dense mask or one by blocks."""
    monkeypatch.setattr(flash, "require_kernels", lambda _: None)
    model.get_base_model().set_attn_implementation(register(kind))
    token = model.config.image_token_id
    steps = StepDataset(
        _staged(token),
        _Quantized(),
        effective_batch_size=4,
        tokens_per_pack=TOKENS + 10,  # the second image has a row of its own
        image_token_id=token,
        merge_size=MERGE,
        seed=None,
        blocks=kind != "sdpa",
    )
    config = TrainConfig(precision="fp32", report_to=("none",), device="cpu", dataloader_num_workers=0)
    trainer = StepTrainer(model, training_arguments(config, tmp_path, evaluate=False), steps, None)
    step = steps[0, 0]
    assert len(step.packs) == 2
    assert all(pack.stage_weights is not None for pack in step.packs)

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        trainer._stage_losses = StageLosses(steps.stage_names, torch.device("cpu"))
        loss = trainer.training_step(trainer.model, _hollow(step, mode))

    assert isinstance(loss, FakeTensor)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with pytest.raises(DataDependentOutputException):
        trainer._stage_losses.take()  # what a log line does
