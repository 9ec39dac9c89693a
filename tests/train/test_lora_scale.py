"""LoRA's scale between its matrices against PEFT's own place for it: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from train.lora_scale import ScaledBetween, scale_between


class Two(torch.nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 48), torch.nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 32) -> (..., 16)."""
        out: torch.Tensor = self.second(torch.nn.functional.silu(self.first(x)))
        return out


def _model(alpha: float, dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=alpha, lora_dropout=dropout, target_modules=["first", "second"])  # type: ignore[arg-type, unused-ignore]
    model = get_peft_model(Two(), config)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _run(model: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(4), requires_grad=True)
    torch.manual_seed(9)  # of dropout
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(x)
    output.float().square().sum().backward()
    return [output, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "dropout"), [(16, 0.0), (2, 0.0), (8, 0.0), (16, 0.25)])
def test_outputs_and_gradients_are_the_same_bits(alpha: float, dropout: float, dtype: torch.dtype | None) -> None:
    changed = _model(alpha, dropout)
    assert scale_between(changed) == 2

    for found, right in zip(_run(changed, dtype), _run(_model(alpha, dropout), dtype), strict=True):
        assert right.abs().max() > 0
        assert torch.equal(found, right)


def test_other_scales_stay_where_they_are() -> None:
    assert scale_between(_model(alpha=12)) == 0


def test_other_variants_are_left_alone() -> None:
    config = LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=["first"])
    model: Any = get_peft_model(Two(), config)  # type: ignore[arg-type]

    assert scale_between(model) == 0
    assert not isinstance(model.base_model.model.first.lora_variant["default"], ScaledBetween)


def test_what_is_saved_is_the_same() -> None:
    changed, other = _model(alpha=16), _model(alpha=16)
    scale_between(changed)

    assert changed.state_dict().keys() == other.state_dict().keys()
    assert changed.peft_config["default"].to_dict() == other.peft_config["default"].to_dict()
