"""LoRA's scale applied between its two matrices, to `r` numbers a token in place of the layer's width.

In the backward pass the scaled gradient of the whole output need not be written then. A scale that is a power of two
changes no digits there, and so the numbers are the same; others stay where PEFT has them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant


class ScaledBetween(LoraVariant):
    """PEFT's own way to compute a layer otherwise. It only ever trains: what is merged is loaded without it."""

    @staticmethod
    def forward(  # type: ignore[override, unused-ignore]
        module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """result + B(scale * A(dropout(x))); shapes (..., in) and (..., out)."""
        reduced = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        added: torch.Tensor = module.lora_B[active_adapter](reduced * module.scaling[active_adapter])
        return result + added


def scale_between(model: Any) -> int:
    """Change the LoRA layers below `model` whose scale is a power of two, in place. Returns how many."""
    changed = 0
    for module in model.modules():
        variants = getattr(module, "lora_variant", None)
        if variants is None:
            continue
        for adapter, scale in module.scaling.items():
            if adapter in module.lora_A and adapter not in variants and math.frexp(scale)[0] == 0.5:
                variants[adapter] = ScaledBetween()
                changed += 1
    return changed
