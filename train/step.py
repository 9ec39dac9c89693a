"""What is in an optimizer step, and how it travels: distinct images once, packs that point at them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from train.features import StepImage
from train.handing_over import Bundle
from train.pack import Pack


@dataclass(frozen=True, slots=True)
class Step:
    """One process's share of an optimizer step.

    Attributes:
        packs: at least one.
        images: the distinct images of the packs.
        total_weight: sum of the loss weights over the whole step, all processes together.
        num_samples: of the whole step.
        num_image_tokens: placeholders of the whole step.
    """

    packs: tuple[Pack, ...]
    images: tuple[StepImage, ...]
    total_weight: float
    num_samples: int
    num_image_tokens: int

    def __reduce__(self) -> tuple[Any, ...]:
        """How a worker hands it over."""
        return _handed_over, (Bundle.of([getattr(self, field.name) for field in fields(self)]),)

    def pin_memory(self) -> Step:
        """Called by the data loader where there is a GPU."""
        return Step(
            tuple(pack.map_tensors("pin_memory") for pack in self.packs),
            tuple(image.pin_memory() for image in self.images),
            self.total_weight,
            self.num_samples,
            self.num_image_tokens,
        )


def _handed_over(bundle: Bundle) -> Step:
    return Step(*bundle.content())
