"""Which images a split names, and which were refused: documents of a cache's folder."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ConfigDict, Field

from cache.documents import FileDocument
from cache.keys import Key

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SplitImage:
    """One image of a split. Size and modification time tell whether the file is still the one that was hashed."""

    # No model: a split may have a million images, and models take twice the memory and time.
    __pydantic_config__ = ConfigDict(extra="forbid")

    path: str
    key: Key
    image_grid_thw: Grid
    size: int
    mtime_ns: int


class SplitImages(FileDocument):
    """The images that a split's records name, and those that were refused.

    `root`: what the names are relative to; None in lists of earlier versions. `num_parts`: among how many parts the
    images are divided (cache.parts), so that it can be said which one is missing.
    """

    split: str
    source: str
    num_records: int
    root: str | None = None
    images: list[SplitImage]
    refused: dict[str, str]
    num_parts: int = Field(default=1, ge=1)


class RefusedImage(FileDocument):
    """An image that could not be decoded by the part that it belongs to; tells the other parts."""

    key: Key
    reason: str
