"""The FP8 base: products against fp64, gradients of the same rounded weights, training and its adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.config import ModelConfig
from cache.errors import ConfigError, ResourceError
from train import fp8
from train.config import TrainConfig
from train.fp8 import FP8, Fp8Linear, rows_to_fp8, to_fp8
from train.model import load_full_model, load_language_model

from .conftest import Run

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="FP8 products with a scale for each row are on the CPU from torch 2.12 on"
)


def _layer(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(128, 256, bias=False)


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.detach().double() - right.detach().double()).norm() / right.detach().double().norm())


@given(seed=st.integers(0, 1000), exponent=st.integers(-60, 60))
def test_a_rounded_row_is_within_half_a_step_of_fp8(seed: int, exponent: int) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent

    rounded, scale = rows_to_fp8(x)
    back = rounded.float() * scale

    assert rounded.dtype == FP8
    # Three bits behind the leading one; numbers under 2**-6 of the format have a step of 2**-9.
    assert bool(((back - x).abs() <= x.abs() * 2.0**-4 + scale * 2.0**-10).all())
    assert bool((back.abs().amax(-1) >= x.abs().amax(-1) * (1 - 2.0**-4)).all())


def test_a_row_of_zeros_stays_zero() -> None:
    rounded, scale = rows_to_fp8(torch.zeros(2, 16))

    assert bool((rounded.float() == 0).all())
    assert bool(torch.isfinite(scale).all())


def test_products_are_off_by_the_stated_error_both_ways() -> None:
    layer = _layer()
    x = torch.randn(300, 128, requires_grad=True)
    right = x.double() @ layer.weight.double().t()
    gradient = torch.randn(300, 256)
    (right_gradient,) = torch.autograd.grad(right, x, gradient.double())

    found = Fp8Linear(layer)(x)
    (found_gradient,) = torch.autograd.grad(found, x, gradient)

    assert 0.01 < _error(found, right) < 0.05
    assert 0.01 < _error(found_gradient, right_gradient) < 0.05


def test_numbers_that_fp8_holds_are_multiplied_exactly() -> None:
    layer = _layer()
    generator = torch.Generator().manual_seed(1)
    # Whole numbers up to 7 and one 448 a row: the scale of every row is 1 and nothing is rounded.
    whole = torch.randint(-7, 8, (256, 128), generator=generator).float()
    whole[:, 0] = 448
    x = torch.randint(-7, 8, (40, 128), generator=generator).float()
    x[:, 1] = 448
    layer.weight.data = whole

    assert torch.equal(Fp8Linear(layer)(x), x @ whole.t())


def test_the_gradient_is_that_of_the_rounded_weights() -> None:
    layer = _layer()
    fp8 = Fp8Linear(layer)
    x = torch.randn(60, 128, requires_grad=True)
    rounded = fp8.weight.view(FP8).float() * fp8.weight_scale
    gradient = torch.randn(60, 256)

    (found,) = torch.autograd.grad(fp8(x), x, gradient)
    weighted, scale = rows_to_fp8(gradient * fp8.weight_scale.t())

    assert torch.equal(fp8.weight.t(), fp8.weight_t)
    expected = weighted.float() * scale @ (rounded / fp8.weight_scale)
    assert _error(found, expected) < 1e-5


def test_bias_autocast_and_dtype() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 48)
    fp8 = Fp8Linear(layer)
    x = torch.randn(2, 5, 32)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fp8(x)

    assert (output.shape, output.dtype) == ((2, 5, 48), torch.bfloat16)
    assert _error(output, layer(x)) < 0.06
    assert fp8(x).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own doing
def test_it_compiles_without_a_graph_break() -> None:
    fp8 = Fp8Linear(_layer())
    compiled = torch.compile(fp8, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (40, 56):
        x = torch.randn(rows, 128, dtype=torch.bfloat16, requires_grad=True)
        output = compiled(x)
        output.sum().backward()
        assert torch.equal(output, fp8(x))
        assert x.grad is not None


def test_widths_that_the_products_cannot_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiples of 16; 0 is 24 x 32") as caught:
        to_fp8(torch.nn.Sequential(torch.nn.Linear(24, 32)))

    assert "none or nf4" in str(caught.value)


class _Counted(torch.nn.Parameter):
    """A weight that is counted while it is there."""

    living = 0

    def __new__(cls, data: torch.Tensor) -> _Counted:
        cls.living += 1
        return torch.nn.Parameter.__new__(cls, data, requires_grad=False)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        type(self).living -= 1


def test_an_old_weight_goes_before_the_next_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(5)))
    for layer in model:
        layer.weight = _Counted(layer.weight.data)
    before: list[int] = []
    round_rows = fp8.rows_to_fp8
    monkeypatch.setattr(fp8, "rows_to_fp8", lambda x: (before.append(_Counted.living), round_rows(x))[1])

    to_fp8(model)

    assert before == [5, 4, 3, 2, 1]


def test_memory_that_ends_while_rounding_is_said_to_be_too_small_for_the_model(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fp8, "rows_to_fp8", full)
    config = TrainConfig(quantization="fp8", precision="bf16")

    for load in (load_language_model, load_full_model):
        with pytest.raises(ResourceError, match="the language model does not fit the GPU's memory"):
            load(ModelConfig(name_or_path=str(tiny)), config, torch.device("cpu"))


def test_training_on_an_fp8_base_is_near_the_exact_one(run_cached: Callable[..., Run]) -> None:
    settings = {"max_steps": 4, "effective_batch_size": 5, "precision": "bf16", "learning_rate": 3e-3}
    exact = run_cached("exact", **settings)
    fp8 = run_cached("fp8", **settings, quantization="fp8")

    assert len(fp8.losses()) == 4
    assert list(fp8.losses().values()) == pytest.approx(list(exact.losses().values()), rel=0.02)
    assert fp8.losses() != exact.losses()
    assert fp8.adapter().keys() == exact.adapter().keys()


def test_a_mixture_of_experts_is_refused(tiny_moe: Path) -> None:
    config = TrainConfig(quantization="fp8", precision="bf16")

    with pytest.raises(ConfigError, match="covers linear layers, which hold only"):
        load_language_model(ModelConfig(name_or_path=str(tiny_moe)), config, torch.device("cpu"))


def test_full_precision_beside_it_is_refused() -> None:
    with pytest.raises(ValueError, match="gives its products in bf16 or fp16"):
        TrainConfig(quantization="fp8", precision="fp32")
