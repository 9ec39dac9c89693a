"""Decoding, and resizing unless a GPU does it, in worker processes ahead of the tower."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.data import Dataset

from cache.config import CacheConfig
from cache.errors import DataError, ReadError
from cache.forking_loader import ForkingLoader
from cache.gpu_resize import decoded, pixel_values
from cache.keys import image_key
from cache.patches import Normalizer, cut
from cache.preprocess import ImageProcessor, decode
from cache.records import ImageRef


@dataclass(frozen=True, slots=True)
class Pixels:
    """One image on its way to the tower, or why it cannot be decoded.

    Attributes:
        index: which of the images.
        content: uint8; patches as cache.patches.cut gives them, or where a GPU resizes the image as
            cache.gpu_resize.decoded does.
        image_grid_thw: (3,) int64.
        error: set when the image cannot be used; then the tensors are empty.
        unreadable: set when its file cannot be read, which says nothing about the image.
    """

    index: int
    content: torch.Tensor
    image_grid_thw: torch.Tensor
    error: DataError | None = None
    unreadable: ReadError | None = None

    @property
    def num_patches(self) -> int:
        """Patches of the resized image; 0 where it cannot be used."""
        return math.prod(self.image_grid_thw.tolist()) if len(self.image_grid_thw) else 0

    def pin_memory(self) -> Pixels:
        """Called by the data loader where there is a GPU."""
        return replace(self, content=self.content.pin_memory())


class _PixelDataset(Dataset[Pixels]):
    def __init__(
        self, images: Sequence[tuple[str, ImageRef]], processor: ImageProcessor, max_image_pixels: int
    ) -> None:
        self._images, self._processor, self._limit = images, processor, max_image_pixels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Pixels:
        key, ref = self._images[index]
        try:
            data = ref.read()
            # The entry is looked up by its content: features of other bytes under this key would be silently wrong.
            if image_key(data) != key:
                raise DataError(
                    "the image is not the one that was hashed before: it was overwritten meanwhile, or changed without "
                    "a change of size and modification time",
                    where=ref.path,
                    do="touch the file, so that it is hashed again, and run the same command again",
                )
            image = decode(data, where=ref.path, max_image_pixels=self._limit)
            hand_over = cut if self._processor.device == "cpu" else decoded
            return Pixels(index, *hand_over(self._processor, image, where=ref.path))
        except DataError as error:
            # Handed over as a value: raised in a worker it would end the whole loader.
            return Pixels(index, torch.empty(0), torch.empty(0), error)
        except ReadError as error:
            return Pixels(index, torch.empty(0), torch.empty(0), unreadable=error)


def load_pixels(
    images: Sequence[tuple[str, ImageRef]], processor: ImageProcessor, cache: CacheConfig
) -> Iterator[Pixels]:
    """Every image in order, prepared by `cache.num_workers` processes.

    Args:
        images: key and place of each; bytes that do not have that key are an error.

    Raises:
        ReadError: a file that is there cannot be read.
    """
    loader = ForkingLoader(
        _PixelDataset(images, processor, cache.max_image_pixels),
        batch_size=None,
        num_workers=min(cache.num_workers, len(images)),
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=leave_signals_to_parent,
    )
    for pixels in loader:
        if pixels.unreadable is not None:
            raise pixels.unreadable
        yield pixels


def values_on(
    device: torch.device, images: Sequence[tuple[str, ImageRef]], processor: ImageProcessor
) -> Callable[[Pixels], torch.Tensor]:
    """What the tower's process does with the images that `load_pixels` hands over, so that they are its input.

    Args:
        images: as `load_pixels` had them; they are named in errors.

    Returns:
        Pixels -> (P, C * temporal_patch_size * patch_size**2) on the device; see cache.patches.Normalizer and
        cache.gpu_resize.pixel_values, also for the errors.
    """
    if processor.device == "cpu":
        normalize = Normalizer(processor, device)
        return lambda pixels: normalize(pixels.content)
    return lambda pixels: pixel_values(processor, pixels.content, device, where=images[pixels.index][1].path)


def leave_signals_to_parent(_worker: int) -> None:
    """For data-loader workers: a scheduler signals every process of a job, and only the parent knows when to stop.

    A worker that ended by itself would cost the parent the checkpoint that it was about to write.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
