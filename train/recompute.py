"""Activation checkpointing: activations are computed again in the backward pass in place of being kept."""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config


def recomputing(model: Any, wanted: bool) -> None:
    """Turn activation checkpointing on or off, as Trainer does, for what is compiled from here on as well.

    From transformers 5.23 on compiled layers contain it, so it is the compiler that decides what is kept. Before torch
    2.13 it kept, in spite of activation checkpointing, what an autograd.Function had computed: the products of a base
    in NF4 or FP8, more than half of all activations. A budget of nothing has no exceptions; not even for what dropout
    drops, which would be drawn anew, so with dropout the compiler has its way.
    See docs/decisions/0018-activation-checkpointing.md.

    Args:
        model: its layers are compiled already where they are going to be.
    """
    # transformers renamed these within the range of versions that is supported.
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if wanted:
        getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
    else:
        getattr(model, f"{name}_disable")()
    nothing = wanted and _compiled_with_it(model) and not _drops(model)
    torch._functorch.config.activation_memory_budget = 0.0 if nothing else 1.0


def _compiled_with_it(model: Any) -> bool:
    """Whether layers are compiled, and contain their checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    return compiled and "__call__" not in vars(GradientCheckpointingLayer)


def _drops(model: Any) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
