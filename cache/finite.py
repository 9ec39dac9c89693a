"""Whether features are numbers at all: an overflow, a broken device or bad weights must not become a cache."""

from __future__ import annotations

import torch

from cache.config import Dtype
from cache.errors import DataError
from cache.features import VisionFeatures


def finite_levels(features: VisionFeatures) -> torch.Tensor:
    """Whether all numbers of a level are finite: (1 + L,) bool on the features' device, the main level first.

    No synchronisation with the device.
    """
    levels = (features.image_embeds[None], features.deepstack_features)
    # The extremes take one pass without a copy of the features; both are nan where one number is.
    extremes = [torch.stack(level.flatten(1).aminmax(dim=1)) for level in levels]
    return torch.isfinite(torch.cat(extremes, dim=1)).all(0)


def require_finite(finite: torch.Tensor, *, dtype: Dtype, where: str) -> None:
    """Refuse features of which a level is not finite.

    Args:
        finite: of `finite_levels`, on the CPU.
        dtype: in which the tower ran.
        where: names the image.

    Raises:
        DataError: names the levels, and what to try.
    """
    bad = [f"deepstack.{number - 1}" if number else "main" for number, good in enumerate(finite.tolist()) if not good]
    if not bad:
        return
    many = len(bad) > 1
    wider = "bfloat16 or float32" if dtype == "float16" else "float32"
    first = "" if dtype == "float32" else f"set cache.dtype: {wider}, or "
    reason = ", whose range ends at 65504" if dtype == "float16" else ""
    raise DataError(
        f"the features are not finite (nan or infinite) in level{'s' if many else ''} {', '.join(bad)}; the tower ran "
        f"in {dtype}{reason}",
        where=where,
        do=f"{first}run on another GPU; if that is no help, look at the checkpoint's vision weights. What was cached "
        "before this image is kept",
    )
