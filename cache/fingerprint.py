"""Everything that decides the features' numbers. Caches made otherwise are kept apart by it, never mixed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, ModelConfig, StorageDtype
from cache.preprocess import ImageProcessor

FORMAT_VERSION = 1

# Written by transformers into a config without any bearing on the numbers, or stated by a field of their own.
_NOT_NUMBERS = {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "_attn_implementation"}

# Fields that came later, and are left out where they say this: older caches keep their names.
_LEFT_OUT = {"processor.device": "cpu"}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Flat fields, so that what differs can be shown field by field.

    Attributes:
        fields: dotted name -> JSON value.
    """

    fields: dict[str, Any]

    @classmethod
    def of(
        cls, *, weights: VisionWeights, vision_config: Any, processor: ImageProcessor, cache: CacheConfig
    ) -> Fingerprint:
        """The fingerprint of features made in this way.

        Args:
            vision_config: the tower's transformers config.
        """
        settings = {k: v for k, v in vision_config.to_diff_dict().items() if k not in _NOT_NUMBERS}
        fields = {
            "format_version": FORMAT_VERSION,
            "vision_weights": weights.digest(),
            **{f"vision_config.{key}": value for key, value in sorted(settings.items())},
            **{f"processor.{key}": value for key, value in sorted(processor.settings.items())},
            "dtype": cache.dtype,
            "storage_dtype": cache.storage_dtype,
            "attn_implementation": cache.attn_implementation,
            "tower": cache.tower,
            "patches_per_batch": cache.patches_per_batch,
        }
        return cls(json.loads(json.dumps(fields)))

    def with_storage(self, storage_dtype: StorageDtype) -> Fingerprint:
        """The same features stored in another dtype, as `pipeline repack` makes them."""
        return Fingerprint(self.fields | {"storage_dtype": storage_dtype})

    @property
    def name(self) -> str:
        """Folder name of what this fingerprint holds: 16 hex digits."""
        canonical = json.dumps(self.fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint, *, ignore: frozenset[str] = frozenset()) -> list[str]:
        """One line for each field that differs: what the cache has (self), what is asked for (other)."""
        mine, others = _LEFT_OUT | self.fields, _LEFT_OUT | other.fields
        return [
            f"{name}: {mine.get(name)!r} in the cache, {others.get(name)!r} asked for"
            for name in sorted((mine.keys() | others.keys()) - ignore)
            if mine.get(name) != others.get(name)
        ]


def expected_fingerprint(model: ModelConfig, cache: CacheConfig) -> Fingerprint:
    """What a cache for this configuration has. Reads the tower's tensors but builds nothing."""
    return Fingerprint.of(
        weights=VisionWeights.find(model),
        vision_config=load_hf_config(model).vision_config,
        processor=ImageProcessor.from_checkpoint(model, cache),
        cache=cache,
    )
