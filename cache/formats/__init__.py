"""Shard formats. Each turns entries into one file and reads single entries back; all sit the same exam."""

from cache.formats.base import Entry, ShardFormat, ShardReader
from cache.formats.safetensors_shard import SafetensorsFormat

FORMATS: dict[str, ShardFormat] = {SafetensorsFormat.name: SafetensorsFormat()}

__all__ = ["FORMATS", "Entry", "SafetensorsFormat", "ShardFormat", "ShardReader"]
