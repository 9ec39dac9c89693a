"""Image features into the language model at positions that the host knows.

The stock code finds the positions on the device, by masks, and the host waits for their number some thirty times a row.
The numbers are the same: each feature is copied, or added once, where its placeholder stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def at_positions(kind: type[Any]) -> type[Any]:
    """A stock language model whose DeepStack levels are added at positions, (M,) int64, or by a mask as before."""

    class AtPositions(kind):
        def _deepstack_process(
            self, hidden_states: torch.Tensor, visual_pos_masks: torch.Tensor, visual_embeds: torch.Tensor
        ) -> torch.Tensor:
            if visual_pos_masks.dtype == torch.bool:
                return super()._deepstack_process(hidden_states, visual_pos_masks, visual_embeds)
            added = hidden_states.index_select(1, visual_pos_masks) + visual_embeds.to(hidden_states.dtype)
            return hidden_states.index_copy(1, visual_pos_masks, added)

    AtPositions.__name__, AtPositions.__qualname__ = kind.__name__, kind.__qualname__
    return AtPositions


def hidden_states(
    language_model: Any,
    input_ids: torch.Tensor,
    image_positions: torch.Tensor,
    embeds: Sequence[torch.Tensor],
    levels: Sequence[Sequence[torch.Tensor]],
    read_positions: torch.Tensor,
    **inputs: Any,
) -> torch.Tensor:
    """The last hidden states of a row where they are read.

    Args:
        language_model: of the kind that `at_positions` gives, its last layer of the kind that `reading_some` gives.
        input_ids: (1, S) int64.
        image_positions: (M,) int64, of the placeholders, ascending.
        embeds: of each image (N, D), M rows in all.
        levels: the same for each DeepStack level.
        read_positions: (T,) int64.
        inputs: what else the stock language model takes.

    Returns:
        (T, D).

    Raises:
        ValueError: there are more or fewer features than placeholders.
    """
    text: torch.Tensor = language_model.embed_tokens(input_ids)
    visual: dict[str, Any] = {}
    if sum(len(e) for e in embeds) != len(image_positions):
        raise ValueError(f"{len(image_positions)} placeholders, but features of {[len(e) for e in embeds]} tokens")
    if embeds:
        text = text.index_copy(1, image_positions, torch.cat(list(embeds))[None].to(text.dtype))
        visual = {
            "visual_pos_masks": image_positions,
            "deepstack_visual_embeds": [torch.cat(list(level)) for level in levels],
        }
    given = {name: value for name, value in inputs.items() if value is not None}  # PEFT names all that it knows
    if len(levels) >= len(language_model.layers):  # the last layer's output then takes features at all positions
        whole: torch.Tensor = language_model(inputs_embeds=text, **visual, **given).last_hidden_state
        return whole[0].index_select(0, read_positions)
    read: torch.Tensor = language_model(
        inputs_embeds=text, read_positions=read_positions, **visual, **given
    ).last_hidden_state
    return read[0]
