"""Shard formats. Each turns entries into one file and reads single entries back; all sit the same exam."""

from cache.formats.base import Entry, ShardFormat, ShardReader
from cache.formats.hdf5_shard import Hdf5Format
from cache.formats.safetensors_shard import SafetensorsFormat
from cache.formats.webdataset_shard import WebDatasetFormat

FORMATS: dict[str, ShardFormat] = {
    shard_format.name: shard_format for shard_format in (SafetensorsFormat(), WebDatasetFormat(), Hdf5Format())
}

__all__ = ["FORMATS", "Entry", "Hdf5Format", "SafetensorsFormat", "ShardFormat", "ShardReader", "WebDatasetFormat"]
