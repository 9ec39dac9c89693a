"""Which images go through the vision tower together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cache.config import CacheConfig
from cache.pixels import Pixels
from cache.records import ImageRef
from cache.split_images import SplitImage

Todo = tuple[SplitImage, ImageRef]


def in_batch_order(todo: Sequence[Todo], cache: CacheConfig) -> list[Todo]:
    """Images of one shape behind one another, where they may share a batch; else as they come."""
    if cache.patches_per_batch is None:
        return list(todo)
    return sorted(todo, key=lambda item: item[0].image_grid_thw)


def batches(images: Iterable[Pixels], cache: CacheConfig) -> Iterator[list[Pixels]]:
    """Neighbours of one shape, up to `patches_per_batch` patches together; image by image where that is not set.

    What could not be decoded is passed on, and counts for nothing.
    """
    budget = cache.patches_per_batch
    batch: list[Pixels] = []
    shape, held = None, 0
    for pixels in images:
        patches = pixels.num_patches
        its_shape = tuple(pixels.image_grid_thw.tolist())
        if batch and (budget is None or its_shape != shape or held + patches > budget):
            yield batch
            batch, held = [], 0
        batch.append(pixels)
        shape, held = its_shape, held + patches
    if batch:
        yield batch
