"""Steps' packs on the device, one after another: an image's features are there from its first pack to its last.

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

_Begun = dict[int, StepImage]  # by place in the step's list of images; copies under way


class Feeder:
    """Puts steps on a device, pack by pack. Where they are in page-locked memory, the host does not wait for it.

    Args:
        tower: for images that come as pixels; see features_on.
    """

    def __init__(self, device: torch.device, tower: VisionTower | None) -> None:
        self._device, self._tower = device, tower
        self._copies = _Copies(device)
        self._next: tuple[Step, _Begun] | None = None

    def packs(self, step: Step, following: Step | None = None) -> Iterator[tuple[Pack, Mapping[int, VisionFeatures]]]:
        """Each pack on the device with its images' features there, by their place in the step's list of images.

        Args:
            following: the step that comes next, if known: what its first pack needs is copied beside this one's last.

        Returns:
            What belongs to a pack holds until the next one is asked for.
        """
        last = {place: number for number, pack in enumerate(step.packs) for place in pack.images}
        held: dict[int, VisionFeatures] = {}
        try:
            coming = self._begun(step)
            for number, pack in enumerate(step.packs):
                self._copies.finish()
                held |= zip(coming, features_on(self._device, list(coming.values()), self._tower), strict=True)
                if number + 1 < len(step.packs):
                    coming = self._begin(step, number + 1)
                elif following is not None:
                    self._next = following, self._begin(following, 0)
                yield pack.map_tensors("to", self._device, non_blocking=True), held
                for place in [place for place in held if last[place] == number]:
                    del held[place]
        finally:
            self._copies.finish()

    def forget(self) -> None:
        """Free what was copied for a step that is not next after all, or not soon."""
        self._next = None

    def _begun(self, step: Step) -> _Begun:
        """What the step's first pack needs; begun beside the step before, if that one knew of this."""
        known, self._next = self._next, None
        return known[1] if known is not None and known[0] is step else self._begin(step, 0)

    def _begin(self, step: Step, number: int) -> _Begun:
        """Copy the images that a pack is the first to need."""
        earlier = {place for pack in step.packs[:number] for place in pack.images}
        places = [place for place in dict.fromkeys(step.packs[number].images) if place not in earlier]
        return dict(zip(places, self._copies.begin([step.images[place] for place in places]), strict=True))


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
