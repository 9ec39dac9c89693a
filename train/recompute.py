"""Activation checkpointing: activations are computed again in the backward pass in place of being kept."""

from __future__ import annotations

from typing import Any

import torch._functorch.config


def recomputing(model: Any, wanted: bool) -> None:
    """Turn activation checkpointing on or off, as Trainer does, for what is compiled from here on as well.

    In compiled layers it is the compiler that decides what is kept, and before torch 2.13 it kept, in spite of
    activation checkpointing, what an autograd.Function had computed: the products of a base in NF4 or FP8, more than
    half of all activations (docs/decisions/0018-activation-checkpointing.md). A budget of nothing has no exceptions.
    """
    # transformers renamed these within the range of versions that is supported.
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    if wanted:
        getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
    else:
        getattr(model, f"{name}_disable")()
    torch._functorch.config.activation_memory_budget = 0.0 if wanted else 1.0
