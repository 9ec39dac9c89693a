"""What has to be done for a split, known before anything is spent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from cache.bad_records import reject_images
from cache.config import DataConfig
from cache.dataset import Rejection, read_split, require_few
from cache.manifest import Manifest, SplitImage, load_shard_indexes, load_split
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import ImageRef, Record
from cache.scan import ImageScanner


@dataclass(frozen=True, slots=True)
class Plan:
    """The work for one split.

    Attributes:
        path: where the split lies.
        num_records: rows of the dataset.
        records: the usable ones.
        images: every usable image path of the split.
        refused: image path -> why it cannot be used.
        todo: the distinct images that are not committed yet, with where to read them.
        rejected: the records left out.
        image_tokens: of all distinct images.
        todo_bytes: what `todo` will take on disk.
    """

    split: str
    folder: Path
    path: str
    num_records: int
    records: tuple[Record, ...]
    images: list[SplitImage]
    refused: dict[str, str]
    todo: list[tuple[SplitImage, ImageRef]]
    rejected: list[Rejection]
    image_tokens: int
    todo_bytes: int

    @property
    def num_distinct(self) -> int:
        """Distinct images by content."""
        return len({image.key for image in self.images})

    def describe(self) -> str:
        """What would be done, in lines for a person."""
        return (
            f"split {self.split}: {self.num_records} records, {len(self.rejected)} to leave out, "
            f"{self.num_distinct} distinct images, {self.image_tokens} image tokens\n"
            f"  to encode   {len(self.todo)} images, {self.todo_bytes / 1e6:.2f} MB\n"
            f"  free        {free_bytes(self.folder) / 1e6:.0f} MB\n"
            f"  cache       {self.folder}"
        )


def make_plan(
    data: DataConfig,
    split: str,
    *,
    folder: Path,
    manifest: Manifest,
    processor: ImageProcessor,
    max_image_pixels: int,
    progress: Progress,
) -> Plan:
    """Read the records, look at each image's header and hash, and find what is still to do.

    Raises:
        DataError: a record or an image cannot be used, and `data.on_bad_record` is `fail` or too many are bad.
    """
    read = read_split(data, split)
    scanned = ImageScanner(processor, load_split(folder, split), max_image_pixels).scan(read.records, progress)
    refused = {image.ref.path: image.error for image in scanned if image.error is not None}
    rejected = [*read.rejected, *reject_images(read.records, refused, data)]
    require_few(rejected, read.total, data, read.path)
    committed = {entry.key for index in load_shard_indexes(folder) for entry in index.entries}
    distinct = {image.listed.key: (image.listed, image.ref) for image in scanned if image.listed is not None}
    todo = [image for key, image in distinct.items() if key not in committed]
    left_out = {r.source for r in rejected}
    return Plan(
        split=split,
        folder=folder,
        path=read.path,
        num_records=read.total,
        records=tuple(record for record in read.records if record.source not in left_out),
        images=[image.listed for image in scanned if image.listed is not None],
        refused={path: error.what for path, error in refused.items()},
        todo=todo,
        rejected=rejected,
        image_tokens=sum(processor.num_tokens(image.image_grid_thw) for image, _ in distinct.values()),
        todo_bytes=sum(processor.num_tokens(image.image_grid_thw) for image, _ in todo) * manifest.bytes_per_token(),
    )


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    return shutil.disk_usage(next(p for p in [folder, *folder.absolute().parents] if p.exists())).free
