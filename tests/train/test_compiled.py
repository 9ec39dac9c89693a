"""Compiled decoder layers: whole graphs, and none more for new lengths. Both are Dynamo's work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

import tests.train.flash_on_cpu  # noqa: F401
from cache import flash
from cache.config import ModelConfig
from cache.features import VisionFeatures
from cache.records import ImageRef
from train.attention import Kind, register
from train.chat import EncodedText
from train.config import LoraConfig, TrainConfig
from train.lora import add_lora
from train.loss import pack_loss
from train.model import load_language_model, prepare_for_training
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.sample import Sample, SampleImage, make_sample

MERGE = 2


@pytest.fixture
def compiled() -> Iterator[None]:
    """Dynamo as in training, without a compiler behind it; nothing compiled before or kept after."""
    before = torch.compiler.get_default_backend()
    torch.compiler.reset()
    counters.clear()
    torch.compiler.set_default_backend("aot_eager")
    yield
    torch.compiler.set_default_backend(before)
    torch.compiler.reset()


def _samples(dice: np.random.Generator, image_token: int) -> list[Sample]:
    """A step: some images with 1 to 9 questions each, and sometimes a text without one."""
    samples = []
    for number in range(dice.integers(1, 4)):
        grid = (1, MERGE * int(dice.integers(2, 9)), MERGE * int(dice.integers(2, 9)))
        image = SampleImage(f"{number}", grid, ImageRef(f"{number}"))
        images = (image,) if number or dice.integers(4) else ()
        for _ in range(dice.integers(1, 10)):
            words = dice.integers(5, 200, dice.integers(4, 90))
            ids = np.concatenate([[image_token] * len(images), words]).astype(np.int32)
            weights = np.zeros(len(ids), dtype=np.float32)
            weights[-3:] = 1
            samples.append(make_sample(EncodedText(ids, weights, ()), images, merge_size=MERGE, source="drawn"))
    return samples


def _pack(samples: Sequence[Sample], image_token: int, *, blocks: bool) -> tuple[Pack, list[VisionFeatures]]:
    grids = {image.key: image.grid for sample in samples for image in sample.images}
    places = {key: place for place, key in enumerate(grids)}
    symbols = symbols_of(samples, image_token)
    order = sharing_order(symbols)
    made = build_pack(
        samples, symbols, order, places, image_token_id=image_token, merge_size=MERGE, share=True, blocks=blocks
    )
    counts = [t * h * w // MERGE**2 for t, h, w in grids.values()]
    return made, [
        VisionFeatures(torch.randn(n, 128), torch.randn(1, n, 128), torch.tensor(grid))
        for n, grid in zip(counts, grids.values(), strict=True)
    ]


# Dynamo looks at every tensor's gradient, and torch warns of that where it is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("flex", False), ("sdpa", False), ("sdpa", True), ("flash", False), ("flash", True)]
)
def test_new_lengths_compile_nothing_new(
    tiny: Path, compiled: None, kind: Kind, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainConfig(precision="fp32", torch_compile=True, lora=LoraConfig(r=4))
    device = torch.device("cpu")
    loaded = load_language_model(ModelConfig(name_or_path=str(tiny)), config, device)
    monkeypatch.setattr(flash, "require_kernels", lambda _: None)
    loaded.set_attn_implementation(register(kind))
    del loaded.model.language_model.layers[1:-1]  # more would take longer and show nothing else
    model: Any = add_lora(loaded, config.lora, seed=1)
    prepare_for_training(model, config, device)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    dice = np.random.default_rng(0)

    def run(count: int, *, learn: bool = kind != "flex") -> set[int]:  # flex_attention has no backward on a CPU
        lengths = set()
        for _ in range(count):
            token = model.config.image_token_id
            pack, features = _pack(_samples(dice, token), token, blocks=kind != "sdpa")
            with torch.set_grad_enabled(learn):
                loss = pack_loss(model, pack, features)
            if learn:
                loss.backward()
            lengths.add(pack.input_ids.shape[1])
        return lengths

    run(3)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert len(run(8)) > 4
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]

    if kind == "flex" or checkpointing:
        return
    # An evaluation between two epochs has graphs of its own; they must not use up the room of those for training.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        model.eval()
        run(3, learn=False)
        model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=3, pad_token_id=0)
        model.train()
        run(3)
