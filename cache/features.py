"""What the vision tower gives for one image, exact or quantised, as dataclasses that check their own shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The name in a configuration and a manifest -> the dtype of what is stored.
QUANTIZED_DTYPES = {"float8_e4m3": torch.float8_e4m3fn, "int8": torch.int8}
SCALE_DTYPE = torch.float32
SCALES = "scales"
_NAMES = ("image_embeds", "deepstack_features", "image_grid_thw")


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in the order in which they are stored and in which a checksum goes over them."""
        return {name: getattr(self, name) for name in _NAMES}

    @property
    def num_tokens(self) -> int:
        """N, the number of placeholders that the image takes in a sequence."""
        return int(self.image_embeds.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the feature tensors."""
        return _num_bytes(self)


@dataclass(frozen=True, slots=True)
class QuantizedFeatures:
    """Features in 8 bits a number, with one scale a token and level; cache.quantize makes and unpacks them.

    Attributes:
        image_embeds: (N, D) float8_e4m3fn or int8.
        deepstack_features: (L, N, D), same dtype.
        image_grid_thw: (3,) int64, as in VisionFeatures.
        scales: (1 + L, N) float32, row 0 for `image_embeds`; a feature is its stored number times its token's scale.
    """

    image_embeds: torch.Tensor
    deepstack_features: torch.Tensor
    image_grid_thw: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        VisionFeatures(self.image_embeds, self.deepstack_features, self.image_grid_thw)  # the same shapes
        if self.image_embeds.dtype not in QUANTIZED_DTYPES.values():
            raise ValueError(f"image_embeds is {self.image_embeds.dtype}, not one of {', '.join(QUANTIZED_DTYPES)}")
        shape = (1 + self.deepstack_features.shape[0], self.image_embeds.shape[0])
        if tuple(self.scales.shape) != shape or self.scales.dtype != SCALE_DTYPE:
            raise ValueError(f"scales is {tuple(self.scales.shape)} {self.scales.dtype}, not {shape} {SCALE_DTYPE}")

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in the order in which they are stored and in which a checksum goes over them."""
        return {name: getattr(self, name) for name in (*_NAMES, SCALES)}

    @property
    def num_tokens(self) -> int:
        """N, the number of placeholders that the image takes in a sequence."""
        return int(self.image_embeds.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the feature tensors and the scales."""
        return _num_bytes(self)


StoredFeatures = VisionFeatures | QuantizedFeatures


def stored_features(tensors: dict[str, torch.Tensor]) -> StoredFeatures:
    """The inverse of `tensors()`.

    Raises:
        ValueError: the shapes or dtypes do not go together.
    """
    return QuantizedFeatures(**tensors) if SCALES in tensors else VisionFeatures(**tensors)


def _num_bytes(features: StoredFeatures) -> int:
    grid = features.image_grid_thw
    return sum(t.numel() * t.element_size() for t in features.tensors().values() if t is not grid)
