"""The last decoder layer's second half only at the positions whose output is read: nothing else depends on the others.

Attention mixes positions and so runs over the whole row. What comes behind it, two thirds of the layer's weights, works
on each position by itself, and behind the last layer only the targets are read.
"""

from __future__ import annotations

from typing import Any

import torch


def reading_some(kind: type[Any]) -> type[Any]:
    """A stock decoder layer whose output can be asked for at some positions: `read_positions`, (T,) int64."""

    class ReadingSome(kind):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            read: torch.Tensor | None = kwargs.pop("read_positions", None)
            if read is None:
                return super().forward(hidden_states, **kwargs)
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden = hidden_states.index_select(1, read) + attended.index_select(1, read)
            output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
            return output

    ReadingSome.__name__, ReadingSome.__qualname__ = kind.__name__, kind.__qualname__
    return ReadingSome
