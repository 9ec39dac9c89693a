"""Loss of a pack: cross-entropy at targets only, weighted, summed. The step divides by its total weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from cache.features import VisionFeatures
from train.model import mm_encoder_outputs
from train.pack import Pack


def pack_logits(model: Any, pack: Pack, features: Sequence[VisionFeatures]) -> torch.Tensor:
    """Logits at the pack's targets.

    Args:
        model: the stock class, bare or wrapped by PEFT or DDP.
        pack: on the model's device.
        features: the step's distinct images; `pack.images` points into them.

    Returns:
        (T, V) in the model's dtype.
    """
    output = model(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        attention_mask=pack.attention_mask(),
        mm_encoder_outputs=mm_encoder_outputs([features[place] for place in pack.images]),
        logits_to_keep=pack.target_positions,
        use_cache=False,
    )
    return output.logits[0]


def pack_loss(model: Any, pack: Pack, features: Sequence[VisionFeatures]) -> torch.Tensor:
    """Sum over the pack's targets of weight * cross-entropy, a scalar in fp32."""
    logits = pack_logits(model, pack, features).float()
    losses = cross_entropy(logits, pack.target_ids, reduction="none")
    return (losses * pack.target_weights).sum()
