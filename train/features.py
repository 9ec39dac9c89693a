"""Where a step's image features come from: the cache, or the tower run in every step (the live path)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.utils.data import get_worker_info

from cache.features import StoredFeatures, VisionFeatures, stored_features
from cache.gpu_resize import decoded, pixel_values
from cache.preprocess import ImageProcessor, decode
from cache.quantize import restore
from cache.reader import FeatureCache
from cache.vision_tower import VisionTower
from train.handing_over import shared_bytes
from train.sample import SampleImage
from train.shared_memory import give_back

_COLOURS = 3


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image as it left the cache, quantised if it is so there.

    Attributes:
        dtype: in which the language model gets it.
    """

    features: StoredFeatures
    dtype: torch.dtype

    def pin_memory(self) -> CachedImage:
        """Page-locked copy. What a worker handed over is given back: the data loader drops it after this."""
        pinned = self._map(lambda tensor: tensor.pin_memory())
        give_back(self.features.image_embeds)  # all of an image's tensors lie in one piece
        return pinned

    def on(self, device: torch.device) -> VisionFeatures:
        """The features on a device; quantised ones travel in their 8 bits and are dequantised there."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        return restore(moved.features, self.dtype)

    def like(self, device: torch.device) -> CachedImage:
        """Room for the same on a device."""
        return self._map(lambda tensor: torch.empty_like(tensor, device=device))

    def fill(self, source: CachedImage) -> None:
        """Copy another's tensors into these."""
        theirs = source.features.tensors()
        for name, tensor in self.features.tensors().items():
            if name != "image_grid_thw":
                tensor.copy_(theirs[name], non_blocking=True)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> CachedImage:
        """A copy in which every tensor but the grid, which the host reads, was changed."""
        tensors = self.features.tensors()
        changed = {name: tensor if name == "image_grid_thw" else change(tensor) for name, tensor in tensors.items()}
        return CachedImage(stored_features(changed), self.dtype)


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


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """An image that is to be resized on the tower's GPU (cache.image_processor_device).

    Attributes:
        pixels: (3, H, W) uint8.
        image_grid_thw: (3,) int64, of the resized image.
        processor: what resizes it.
        where: names it in errors.
    """

    pixels: torch.Tensor
    image_grid_thw: torch.Tensor
    processor: ImageProcessor
    where: str

    def pin_memory(self) -> DecodedImage:
        """Page-locked copy."""
        return replace(self, pixels=self.pixels.pin_memory())

    def on(self, device: torch.device) -> PixelImage:
        """Resized there."""
        processor = _first_equal(self.processor)
        return PixelImage(pixel_values(processor, self.pixels, device, where=self.where), self.image_grid_thw)


@lru_cache(maxsize=4)
def _first_equal(processor: ImageProcessor) -> ImageProcessor:
    """The one that was used before: it has sent mean and standard deviation to the GPU already, which waits for it.

    Every image from a worker comes with a copy of its own.
    """
    return processor


StepImage = CachedImage | PixelImage | DecodedImage


class FeatureSource(ABC):
    """Reads one image for a step. Lives in data-loader workers, so it holds no model.

    Attributes:
        bytes_per_token: of memory, that one merged token of a loaded image takes.
    """

    bytes_per_token: int

    @abstractmethod
    def load(self, image: SampleImage) -> StepImage:
        """Read one image."""


class CachedSource(FeatureSource):
    """Reads the feature cache. No tower, no image files."""

    def __init__(self, cache: FeatureCache) -> None:
        self._cache = cache
        self.bytes_per_token = cache.manifest.bytes_per_token()

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        return CachedImage(
            self._cache.read_stored(image.key, self._shared_memory(image.key)), self._cache.manifest.compute_dtype
        )

    def _shared_memory(self, key: str) -> torch.Tensor | None:
        """In a data-loader worker, memory that the training process maps: it would be copied to such memory anyway."""
        if get_worker_info() is None:
            return None
        return shared_bytes(self._cache.out_bytes(key))


class LiveSource(FeatureSource):
    """Decodes the image itself, and resizes it unless a GPU does, for the tower to run in the step."""

    def __init__(self, processor: ImageProcessor, max_image_pixels: int) -> None:
        self._processor, self._limit = processor, max_image_pixels
        numbers = (processor.merge_size * processor.patch_size) ** 2 * processor.temporal_patch_size * _COLOURS
        self.bytes_per_token = numbers * torch.float32.itemsize

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        where = image.ref.path
        picture = decode(image.ref.read(), where=where, max_image_pixels=self._limit)
        if self._processor.device == "cpu":
            return PixelImage(*self._processor(picture, where=where))
        return DecodedImage(*decoded(self._processor, picture, where=where), self._processor, where)


def features_on(device: torch.device, images: Sequence[StepImage], tower: VisionTower | None) -> list[VisionFeatures]:
    """The images' features on the device; pixels go through the tower, image by image as in the cache stage."""
    found = []
    for image in images:
        if isinstance(image, CachedImage):
            found.append(image.on(device))
        elif tower is None:
            raise TypeError("pixels need the vision tower; this run was set up without it")
        else:
            ready = image.on(tower.device) if isinstance(image, DecodedImage) else image
            found.extend(tower.encode([ready.pixel_values], [ready.image_grid_thw]))
    return found
