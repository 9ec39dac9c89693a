"""How packs attend: three ways to compute the same, registered with transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cache import flash
from cache.errors import ConfigError
from train.config import TrainConfig
from train.flash import flash_attention
from train.pack_mask import PackMask

Kind = Literal["flash", "flex", "sdpa"]
# transformers takes a name with "flash" in it for its own.
NAMES: dict[Kind, str] = {"flash": "packed_fa4", "flex": "packed", "sdpa": "packed"}


def attention_kind(config: TrainConfig, device: torch.device) -> Kind:
    """How packs attend: what the settings say, or the fastest that is there.

    Raises:
        ConfigError: what was asked for does not run here.
    """
    if config.attention == "auto":
        fits = config.precision != "fp32" and flash.runs_on(device) and flash.is_installed()
        return "flash" if fits else "flex" if device.type == "cuda" else "sdpa"
    if config.attention != "sdpa" and device.type != "cuda":
        raise ConfigError(f"train.attention: {config.attention} needs a GPU", do="use auto or sdpa")
    if config.attention == "flash":
        flash.require_hopper("train.attention: flash", device, otherwise="auto or flex")
        flash.require_installed("train.attention: flash", otherwise="auto or flex")
    return config.attention


def what_auto_is(config: TrainConfig, device: torch.device) -> str:
    """The choice of `attention: auto` for the log, and how to get a faster one that this GPU has."""
    kind = attention_kind(config, device)
    faster = kind != "flash" and config.precision != "fp32" and flash.runs_on(device)
    return f"{kind}; flash is faster on this GPU: {flash.INSTALL}" if faster else kind


def register(kind: Kind) -> str:
    """Make the implementation known to transformers and return its name for `attn_implementation`.

    Raises:
        ConfigError: its library cannot be imported.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if kind == "flash":
        flash.require_kernels("train.attention: flash, or auto; flex does without")
    name = NAMES[kind]
    AttentionInterface.register(name, flash_packed_attention if kind == "flash" else packed_attention)
    # Two-dimensional masks, as `generate` makes them for padding, are read as the stock implementation reads them.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flex_attention for a block mask, else the stock sdpa.

    Args:
        query: (1, heads, S, head_dim); key, value: (1, key-value heads, S, head_dim).

    Returns:
        (1, S, heads, head_dim), and no weights.
    """
    if isinstance(attention_mask, BlockMask):
        output = _flex()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return attended


def flash_packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention-4 for a pack's mask, else as `packed_attention`, shapes too."""
    if isinstance(attention_mask, BlockMask):
        if not isinstance(attention_mask, PackMask):
            raise TypeError("a block mask that is no PackMask: what made it from one has lost who sees whom")
        return flash_attention(query, key, value, attention_mask, scaling), None
    return packed_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _flex() -> Callable[..., Any]:
    # Inside a compiled layer the call is part of that layer's graph.
    return flex_attention if torch.compiler.is_compiling() else _compiled_flex()
