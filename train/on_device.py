"""A step's packs on the device, one after another: an image's features are there from its first pack to its last.

While the device computes one pack, it copies what the next one needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from cache.features import VisionFeatures
from cache.vision_tower import VisionTower
from train.features import CachedImage, StepImage, features_on
from train.pack import Pack
from train.step import Step


def packs_on(
    device: torch.device, step: Step, tower: VisionTower | None
) -> Iterator[tuple[Pack, Mapping[int, VisionFeatures]]]:
    """Each pack on the device with its images' features there, by their place in the step's list of images.

    The host does not wait for the device where the step is in page-locked memory.

    Args:
        tower: for images that come as pixels; see features_on.

    Returns:
        What belongs to a pack holds until the next one is asked for.
    """
    first = {place: number for number, pack in reversed(list(enumerate(step.packs))) for place in pack.images}
    last = {place: number for number, pack in enumerate(step.packs) for place in pack.images}
    copies = _Copies(device)
    held: dict[int, VisionFeatures] = {}

    def begin(number: int) -> dict[int, StepImage]:
        places = [place for place in first if first[place] == number]
        return dict(zip(places, copies.begin([step.images[place] for place in places]), strict=True))

    try:
        coming = begin(0)
        for number, pack in enumerate(step.packs):
            copies.finish()
            held |= zip(coming, features_on(device, list(coming.values()), tower), strict=True)
            coming = begin(number + 1)
            yield pack.map_tensors("to", device, non_blocking=True), held
            for place in [place for place in held if last[place] == number]:
                del held[place]
    finally:
        copies.finish()


class _Copies:
    """Copies to a GPU beside what it computes. Elsewhere images stay as they are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, images: Sequence[StepImage]) -> list[StepImage]:
        """Images from the cache as they will be on the device after `finish`; pixels as they are.

        The memory is the computing stream's: what that has freed is free once its work so far is done, for which the
        copies wait. Memory of another stream would be free only when the host hears of it, and a host that runs ahead
        of its GPU would fill it with the features of the whole step.
        """
        if self._beside is None:
            return list(images)
        room = [image.like(self._device) if isinstance(image, CachedImage) else image for image in images]
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            for image, copy in zip(images, room, strict=True):
                if isinstance(image, CachedImage) and isinstance(copy, CachedImage):
                    copy.fill(image)
        return room

    def finish(self) -> None:
        """What is computed from now on may read the copies that were begun."""
        if self._beside is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)
