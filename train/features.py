"""Where a step's image features come from: the cache, or the tower run in every step (the live path)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.features import VisionFeatures
from cache.preprocess import ImageProcessor, decode
from cache.reader import FeatureCache
from cache.vision_tower import VisionTower
from train.sample import SampleImage


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image as it left the cache."""

    features: VisionFeatures

    def pin_memory(self) -> CachedImage:
        """Page-locked copy."""
        f = self.features
        return CachedImage(
            VisionFeatures(f.image_embeds.pin_memory(), f.deepstack_features.pin_memory(), f.image_grid_thw)
        )


@dataclass(frozen=True, slots=True)
class PixelImage:
    """An image as it enters the tower.

    Attributes:
        pixel_values: (P, C * T * patch * patch) float32.
        image_grid_thw: (3,) int64.
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor

    def pin_memory(self) -> PixelImage:
        """Page-locked copy."""
        return PixelImage(self.pixel_values.pin_memory(), self.image_grid_thw)


StepImage = CachedImage | PixelImage


class FeatureSource(ABC):
    """Reads one image for a step. Lives in data-loader workers, so it holds no model."""

    @abstractmethod
    def load(self, image: SampleImage) -> StepImage:
        """Read one image."""


class CachedSource(FeatureSource):
    """Reads the feature cache. No tower, no image files."""

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        return CachedImage(self._cache.read(image.key))


class LiveSource(FeatureSource):
    """Decodes and resizes the image itself, for the tower to run in the step."""

    def __init__(self, processor: ImageProcessor, max_image_pixels: int) -> None:
        self._processor, self._limit = processor, max_image_pixels

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        where = image.ref.path
        picture = decode(image.ref.read(), where=where, max_image_pixels=self._limit)
        return PixelImage(*self._processor(picture, where=where))


def features_on(device: torch.device, images: Sequence[StepImage], tower: VisionTower | None) -> list[VisionFeatures]:
    """The images' features on the device; pixels go through the tower, image by image as in the cache stage."""
    found = []
    for image in images:
        if isinstance(image, CachedImage):
            f = image.features
            embeds, deepstack = (t.to(device, non_blocking=True) for t in (f.image_embeds, f.deepstack_features))
            found.append(VisionFeatures(embeds, deepstack, f.image_grid_thw))
        elif tower is None:
            raise TypeError("pixels need the vision tower; this run was set up without it")
        else:
            found.extend(tower.encode([image.pixel_values], [image.image_grid_thw]))
    return found
