"""Manifests for caches that no tower has made."""

from __future__ import annotations

from typing import Any

from cache.fingerprint import FORMAT_VERSION
from cache.manifest import Manifest


def manifest_of(shard_format: str, **changes: Any) -> Manifest:
    """A manifest of float32 features of width 8 with three DeepStack levels, but for what is given."""
    fields: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "format": shard_format,
        "dtype": "float32",
        "hidden_size": 8,
        "num_deepstack_levels": 3,
        "made_by": {},
    }
    fields |= changes
    return Manifest(**{"fingerprint": {"dtype": fields["dtype"]}, **fields})
