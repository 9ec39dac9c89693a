"""What the vision tower gives for one image, as one dataclass that checks its own shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class VisionFeatures:
    """The vision tower's output for one image. The names are those of transformers and of serving engines.

    Attributes:
        image_embeds: (N, D) merged image tokens, in the language model's width, N = t * h * w / merge_size**2.
        deepstack_features: (L, N, D), one slice per DeepStack level, same dtype as `image_embeds`.
        image_grid_thw: (3,) int64, the image's grid of patches before merging.
    """

    image_embeds: torch.Tensor
    deepstack_features: torch.Tensor
    image_grid_thw: torch.Tensor

    def __post_init__(self) -> None:
        embeds, deepstack, grid = self.image_embeds, self.deepstack_features, self.image_grid_thw
        if embeds.ndim != 2 or deepstack.ndim != 3 or deepstack.shape[1:] != embeds.shape:
            raise ValueError(
                f"image_embeds {tuple(embeds.shape)} and deepstack_features {tuple(deepstack.shape)} "
                "are not (N, D) and (L, N, D)"
            )
        if embeds.dtype != deepstack.dtype:
            raise ValueError(f"image_embeds is {embeds.dtype}, deepstack_features is {deepstack.dtype}")
        if grid.shape != (3,) or grid.dtype != torch.int64:
            raise ValueError(f"image_grid_thw is {tuple(grid.shape)} {grid.dtype}, not (3,) int64")

    @property
    def num_tokens(self) -> int:
        """N, the number of placeholders that the image takes in a sequence."""
        return int(self.image_embeds.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of both feature tensors."""
        return sum(t.numel() * t.element_size() for t in (self.image_embeds, self.deepstack_features))
