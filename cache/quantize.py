"""Features in 8 bits a number with one scale a token and level: half the bytes of bfloat16, at a stated error.

The scale is absmax / the largest number of the format (448 for float8_e4m3fn, arXiv 2209.05433; 127 for int8), in fp32:
4 bytes beside D of a token and level (0.1 % at D = 4096), and no error of its own. One a token, because tokens of one
image differ in size by orders of magnitude and a shared scale would take the precision of the small ones.

Error of one number x whose token and level have the scale s, in fp32 arithmetic, before rounding to the dtype wanted:
    float8_e4m3   at most |x| / 17, less than 2**-4 |x|, where |x| >= 2**-6 s; at most 2**-10 s below (subnormals)
    int8          at most s / 2, that is absmax / 254
Both hold for s >= 2**-126, absmax of 1e-35 or more; smaller tokens take s = 2**-126. Zero stays zero.
"""

from __future__ import annotations

import torch

from cache.config import StorageDtype
from cache.errors import DataError
from cache.features import QUANTIZED_DTYPES, SCALE_DTYPE, QuantizedFeatures, StoredFeatures, VisionFeatures

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Smaller scales would be subnormal in fp32: imprecise, and zero where a GPU flushes them.
_SMALLEST_SCALE = torch.finfo(SCALE_DTYPE).tiny


def quantize(
    features: VisionFeatures, storage_dtype: str, *, where: str | None = None, require_finite: bool = True
) -> QuantizedFeatures:
    """The features in 8 bits; see the module's docstring for the error.

    Args:
        features: in any float dtype, on any device; not changed.
        storage_dtype: `float8_e4m3` or `int8`.
        where: names the image in the error.
        require_finite: look at the numbers, which waits for a GPU. False where another does (cache.finite): what is
            made of others is of no use.

    Returns:
        On the same device; the grid is shared.

    Raises:
        DataError: a feature is nan or infinite.
        KeyError: `storage_dtype` is neither.
    """
    dtype = QUANTIZED_DTYPES[storage_dtype]
    embeds, embeds_scales = _quantize(features.image_embeds[None], dtype, where, require_finite=require_finite)
    deepstack, deepstack_scales = _quantize(features.deepstack_features, dtype, where, require_finite=require_finite)
    return QuantizedFeatures(
        embeds[0], deepstack, features.image_grid_thw, torch.cat([embeds_scales, deepstack_scales])
    )


def dequantize(features: QuantizedFeatures, dtype: torch.dtype) -> VisionFeatures:
    """Stored number times scale, computed in fp32 and rounded to `dtype`, on the features' device.

    A stored number is exact in bfloat16 and float16, so that only the product is rounded; no result is larger than its
    token's absmax. No synchronisation with the device.
    """
    embeds, deepstack = features.image_embeds.to(dtype), features.deepstack_features.to(dtype)
    # In place: the operation computes in fp32, the wider of its inputs, without holding the features in it.
    embeds.mul_(features.scales[0, :, None])
    deepstack.mul_(features.scales[1:, :, None])
    return VisionFeatures(embeds, deepstack, features.image_grid_thw)


def to_storage(
    features: StoredFeatures,
    storage_dtype: StorageDtype,
    dtype: str,
    *,
    where: str | None = None,
    require_finite: bool = True,
) -> StoredFeatures:
    """Features as a cache of these settings stores them.

    Args:
        features: from the tower, or as another cache stores them.
        storage_dtype: see CacheConfig; `same` stores `dtype`.
        dtype: the tower's dtype, `bfloat16`, `float16` or `float32`.
        require_finite: see `quantize`.

    Raises:
        DataError: see `quantize`.
    """
    restored = restore(features, getattr(torch, dtype))
    if storage_dtype == "same":
        return restored
    return quantize(restored, storage_dtype, where=where, require_finite=require_finite)


def restore(features: StoredFeatures, dtype: torch.dtype) -> VisionFeatures:
    """Stored features as the language model takes them: exact ones as they are, quantised ones in `dtype`."""
    return features if isinstance(features, VisionFeatures) else dequantize(features, dtype)


def _quantize(
    values: torch.Tensor, dtype: torch.dtype, where: str | None, *, require_finite: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, N, D) -> the same in `dtype`, and its scales (L, N)."""
    wide = values.to(torch.float32)
    absmax = wide.abs().amax(-1)
    if require_finite and not bool(torch.isfinite(absmax).all()):
        level, token = torch.nonzero(~torch.isfinite(absmax))[0].tolist()
        raise DataError(
            f"a feature is {absmax[level, token].item()} (token {token}), which 8 bits cannot hold",
            where=where,
            do="set cache.dtype: bfloat16 if it is float16, whose range the tower may leave, or check its weights",
        )
    largest = _LARGEST[dtype]
    scales = absmax / largest
    # Rounded down where need be: the largest stored number must not come back larger than absmax, past a dtype's range.
    scales = torch.where(scales * largest > absmax, torch.nextafter(scales, torch.zeros_like(scales)), scales)
    scales = scales.clamp_min(_SMALLEST_SCALE)
    quotient = wide / scales[..., None]
    if dtype == torch.int8:
        quotient = quotient.round()
    return quotient.clamp(-largest, largest).to(dtype), scales
