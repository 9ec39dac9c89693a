"""The feature cache: records, image keys, the vision tower, and the store of its output."""

from cache.errors import CacheError, ConfigError, DataError, PipelineError
from cache.features import VisionFeatures

__all__ = ["CacheError", "ConfigError", "DataError", "PipelineError", "VisionFeatures"]
