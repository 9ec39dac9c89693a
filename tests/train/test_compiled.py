"""Compiled decoder layers: whole graphs, and none more for new lengths. Both are Dynamo's work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._functorch.config
from torch._dynamo.utils import counters

import tests.train.flash_on_cpu  # noqa: F401
from cache import flash
from cache.config import ModelConfig
from cache.features import VisionFeatures
from cache.records import ImageRef
from train.attention import Kind, register
from train.chat import EncodedText
from train.config import TrainConfig
from train.lora import add_lora
from train.loss import pack_loss
from train.model import autocast, load_language_model, prepare_for_training
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.recompute import recomputing
from train.sample import Sample, SampleImage, make_sample

MERGE = 2


CPU = torch.device("cpu")
FEW = {"r": 4, "target_modules": ["q_proj", "down_proj"]}  # more would take longer and show nothing else
# Dynamo looks at every tensor's gradient, and torch warns of that where it is no leaf.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # the compiler's own doing
    pytest.mark.timeout(900),
]


@pytest.fixture(params=["eager"])
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Dynamo as in training, without a compiler behind it; nothing compiled before or kept after."""
    before = torch.compiler.get_default_backend()
    torch.compiler.reset()
    counters.clear()
    torch.compiler.set_default_backend(request.param)
    yield
    torch.compiler.set_default_backend(before)
    torch._functorch.config.activation_memory_budget = 1.0
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


@dataclass(frozen=True)
class Steps:
    """Runs packs of ever new lengths through a model of two compiled layers."""

    model: Any
    kind: Kind
    config: TrainConfig
    dice: np.random.Generator

    @classmethod
    def on(cls, checkpoint: Path, kind: Kind, **settings: Any) -> Steps:
        config = TrainConfig.model_validate({"precision": "fp32", "torch_compile": True, "lora": FEW, **settings})
        loaded = load_language_model(ModelConfig(name_or_path=str(checkpoint)), config, CPU)
        loaded.set_attn_implementation(register(kind))
        del loaded.model.language_model.layers[1:-1]
        model: Any = add_lora(loaded, config.lora, seed=1)
        prepare_for_training(model, config, CPU)
        recomputing(model, config.gradient_checkpointing or False)
        return cls(model.train(), kind, config, np.random.default_rng(0))

    @property
    def learns(self) -> bool:
        """flex_attention has no backward on a CPU."""
        return self.kind != "flex"

    def run(self, count: int, *, learn: bool = True) -> set[int]:
        """The rows' lengths."""
        token = self.model.config.image_token_id
        return {self._one(_samples(self.dice, token), learn=learn and self.learns) for _ in range(count)}

    def kept_a_token(self) -> float:
        """Bytes that are kept for the backward pass, besides parameters."""
        parameters = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            (tokens,) = self.run(1)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens

    def run_one_target(self) -> None:
        """A row of which a single position is read."""
        text = np.array([5, 6, *self.dice.integers(7, 200, 40)], dtype=np.int32)
        weights = (np.arange(len(text)) == len(text) - 1).astype(np.float32)
        self._one([make_sample(EncodedText(text, weights, ()), (), merge_size=MERGE, source="drawn")], learn=True)

    def _one(self, samples: Sequence[Sample], *, learn: bool) -> int:
        pack, features = _pack(samples, self.model.config.image_token_id, blocks=self.kind != "sdpa")
        with torch.set_grad_enabled(learn), autocast(self.config, CPU):
            loss = pack_loss(self.model, pack, features)
        if learn:
            loss.backward()
        return pack.input_ids.shape[1]


@pytest.fixture
def steps(tiny: Path, compiled: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Steps]:
    """Makes a model and steps for it."""
    monkeypatch.setattr(flash, "require_kernels", lambda _: None)

    def make(kind: Kind, **settings: Any) -> Steps:
        return Steps.on(tiny, kind, **settings)

    return make


def _assert_nothing_new(steps: Steps) -> None:
    steps.run(3)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert len(steps.run(8)) > 4
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


NUMBERS = {
    "autocast": {"precision": "bf16"},
    "autocast, dropout": {"precision": "bf16", "lora": {**FEW, "lora_dropout": 0.1}},
    "nf4": {"precision": "bf16", "quantization": "nf4"},
    "fp8": {"precision": "bf16", "quantization": "fp8"},
}


@pytest.mark.parametrize("numbers", ["autocast, dropout", "nf4", pytest.param("fp8", marks=pytest.mark.soak)])
def test_new_lengths_compile_nothing_new_whatever_the_numbers_are_in(steps: Callable[..., Steps], numbers: str) -> None:
    if numbers == "fp8" and torch.__version__ < "2.12":
        pytest.skip("FP8 products with a scale for each row are on the CPU from torch 2.12 on")
    _assert_nothing_new(steps("sdpa", **NUMBERS[numbers]))


def test_new_lengths_compile_nothing_new_in_flex_attention(steps: Callable[..., Steps]) -> None:
    _assert_nothing_new(steps("flex"))


@pytest.mark.parametrize("compiled", ["aot_eager"], indirect=True)  # what traces the backward pass, too
def test_new_lengths_compile_nothing_new_with_activation_checkpointing(steps: Callable[..., Steps]) -> None:
    _assert_nothing_new(steps("flash", gradient_checkpointing=True))


@pytest.mark.parametrize("compiled", ["aot_eager_decomp_partition"], indirect=True)
@pytest.mark.parametrize(
    "numbers",
    [pytest.param("autocast", marks=pytest.mark.soak), "nf4", pytest.param("fp8", marks=pytest.mark.soak)],
)
def test_activation_checkpointing_keeps_little_more_than_the_layers_inputs(
    steps: Callable[..., Steps], numbers: str
) -> None:
    """Whatever the base is in: the compiler decides what is kept."""
    if numbers == "fp8" and torch.__version__ < "2.12":
        pytest.skip("FP8 products with a scale for each row are on the CPU from torch 2.12 on")
    without, recomputed = (
        steps("sdpa", **NUMBERS[numbers], gradient_checkpointing=wanted).kept_a_token() for wanted in (False, True)
    )
    assert recomputed < 2048  # of it 768 what goes into and out of two layers, and 524 the mask
    assert without > 4 * recomputed


def test_evaluation_between_epochs_and_a_single_target_leave_room(steps: Callable[..., Steps]) -> None:
    """They have graphs of their own; these must not use up the room of those for training."""
    made = steps("flash")
    _assert_nothing_new(made)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        made.model.eval()
        made.run(3, learn=False)
        made.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=3, pad_token_id=0)
        made.model.train()
        graphs = counters["stats"]["unique_graphs"]
        made.run_one_target()
        # For the compiler a dimension of size one is another program, of the last layer alone.
        assert counters["stats"]["unique_graphs"] <= graphs + 1
        with torch._dynamo.config.patch(error_on_recompile=True):
            made.run(3)
            made.run_one_target()
    assert not counters["graph_break"]
