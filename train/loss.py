"""Loss of a pack: cross-entropy at targets only, weighted, summed. The step divides by its total weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cache.features import VisionFeatures
from train.head import Targets
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
    images = mm_encoder_outputs([features[place] for place in pack.images])
    output = model(**_inputs(pack), mm_encoder_outputs=images, logits_to_keep=pack.target_positions)
    logits: torch.Tensor = output.logits[0]
    return logits


def pack_loss(
    model: Any,
    pack: Pack,
    features: Sequence[VisionFeatures] | Mapping[int, VisionFeatures],
    *,
    scale: float = 1.0,
    losses: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over the pack's targets of scale * weight * cross-entropy, a scalar in fp32.

    Args:
        model: as train.model.load_language_model gives it, bare or wrapped.
        pack: on the model's device.
        features: the step's distinct images, or by their place among them those of the pack.
        losses: (T,) float32, filled with each target's own loss, without weight and scale.
    """
    targets = Targets(pack.target_positions, pack.target_ids, pack.target_weights * scale, losses)
    images = [features[place] for place in pack.images]
    loss: torch.Tensor = model(
        **_inputs(pack),
        image_positions=pack.image_positions,
        embeds=[image.image_embeds for image in images],
        levels=list(zip(*(image.deepstack_features for image in images), strict=True)),
        targets=targets,
    )
    return loss


def _inputs(pack: Pack) -> dict[str, Any]:
    return {
        "input_ids": pack.input_ids,
        "position_ids": pack.position_ids,
        "attention_mask": pack.attention_mask(),
        "use_cache": False,
    }
