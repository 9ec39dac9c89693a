"""A frozen base in FP8: linear layers whose products run in float8_e4m3 with a scale for each row, both ways.

The weights are rounded once, when the model is loaded; activations and gradients in every product. A product is then
off by some 4 percent (bfloat16: 0.2), which docs/benchmarks/training.md shows beside what it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache.errors import ConfigError

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_LEAST_SHARE = 0.9  # of the weights; below it there would be little FP8 about it
_MULTIPLE = 16  # what the product asks of both widths of a weight


def require_fp8(device: torch.device) -> None:
    """Check that the device has FP8 products. A CPU has them too, slowly.

    Raises:
        ConfigError: it has not.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"train.quantization: fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}",
            do="set train.quantization: none or nf4",
        )


def to_fp8(model: torch.nn.Module) -> None:
    """Replace every linear layer below `model` by its FP8 form, in place, one after another.

    Each old weight is freed before the next is rounded, so the device needs room for the model and one layer more.

    Raises:
        ConfigError: a layer's widths are no multiples of 16, or many weights are in no linear layer (mixture of
            experts).
    """
    names = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    _require_linear(model, names)
    for name in names:
        model.set_submodule(name, Fp8Linear(_linear(model, name)))  # nothing else holds the old weight


def _require_linear(model: torch.nn.Module, names: Sequence[str]) -> None:
    covered = sum(_linear(model, name).weight.numel() for name in names)
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    whole = sum(p.numel() for p in model.parameters()) - sum(e.weight.numel() for e in embeddings)
    if covered < _LEAST_SHARE * whole:
        raise ConfigError(
            f"train.quantization: fp8 covers linear layers, which hold only {covered / whole:.0%} of this model's "
            "weights; a mixture of experts keeps the others elsewhere",
            do="set train.quantization: none or nf4",
        )
    for name in names:
        layer = _linear(model, name)
        if layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE:
            raise ConfigError(
                f"train.quantization: fp8 needs widths that are multiples of {_MULTIPLE}; "
                f"{name} is {layer.in_features} x {layer.out_features}",
                do="set train.quantization: none or nf4",
            )


def _linear(model: torch.nn.Module, name: str) -> torch.nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, torch.nn.Linear)
    return layer


class Fp8Linear(torch.nn.Linear):
    """A frozen linear layer with FP8 weights.

    The weight stands twice, as each direction's product wants it: (out, in) and (in, out). Both hold the same numbers,
    so that the gradient is that of the function computed. They are parameters of bytes: nothing casts those to another
    dtype, and DistributedDataParallel neither reduces them nor sends them at every step, as it does with buffers.

    Args:
        source: the layer to replace, its weight on the device where the product will run.
    """

    def __init__(self, source: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        rounded, scale = rows_to_fp8(source.weight.detach())
        self.weight = _frozen(rounded.view(torch.uint8))
        self.weight_t = _frozen(rounded.view(torch.uint8).t().contiguous())
        self.weight_scale = _frozen(scale)
        self.register_parameter("bias", None if source.bias is None else _frozen(source.bias.detach()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out), in the dtype of autocast, else of the input."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        output: torch.Tensor = _Product.apply(input, self.weight, self.weight_t, self.weight_scale)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """x W^T with both factors in FP8. No gradient for the frozen weight, so the input need not be kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, weight_t: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight_t, scale)
        return _product(x, weight, scale.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight_t, scale = ctx.saved_tensors
        # The weight's scales lie along the axis that is summed over: they go into the other factor.
        ones = torch.ones(1, weight_t.shape[0], dtype=torch.float32, device=gradient.device)
        return _product(gradient, weight_t, ones, column_scale=scale.t()), None, None, None


def rows_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to FP8 with a scale for each row.

    Args:
        x: (R, C), any float dtype.

    Returns:
        (R, C) float8_e4m3fn and (R, 1) float32; a number is its stored value times its row's scale.
    """
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * _LARGEST) / _LARGEST
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(FP8), scale


def _product(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, column_scale: torch.Tensor | None = None
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    rounded, scale = rows_to_fp8(rows if column_scale is None else rows.float() * column_scale)
    # torch.nn.functional.scaled_mm is the public name, which the compiler of torch 2.11 does not know yet.
    output = torch._scaled_mm(
        rounded,
        weight.view(FP8).t(),
        scale_a=scale,
        scale_b=weight_scale.contiguous(),
        out_dtype=x.dtype,
        use_fast_accum=x.device.type == "cuda",
    )
    return output.reshape(*x.shape[:-1], output.shape[-1])


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
