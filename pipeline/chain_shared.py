"""Splits that name the same images: cached at the same time, each would run the tower over them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cache.config import DataConfig
from cache.dataset import read_split


def splits_before(data: DataConfig, splits: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Split -> those before it in `splits` that have an image in common with it; splits without any are not in it.

    Reads rows, no images: two images are one where they are one file, or one place in one Parquet file or dataset.

    Raises:
        DataError: the rows of a split cannot be used, as `cache.dataset.read_split` says it.
    """
    if len(splits) < 2:
        return {}
    images = {split: _images(data, split) for split in splits}
    shared = {
        split: tuple(before for before in splits[:place] if not images[split].isdisjoint(images[before]))
        for place, split in enumerate(splits)
    }
    return {split: before for split, before in shared.items() if before}


def _images(data: DataConfig, split: str) -> set[tuple[str, ...]]:
    """Where each image of a split lies."""
    section = data.splits[split]
    # Of a folder or a hub dataset the name of the split decides which rows are read.
    within = (section.path, "" if Path(section.path).expanduser().is_file() else section.hub_split or split)
    refs = (ref for record in read_split(data, split).records for ref in record.images)
    return {(str(ref.file),) if ref.file is not None else (*within, ref.path) for ref in refs}
