"""What has to be done for a split, known before anything is spent."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cache.atomic import TEMPORARY_MARK, disk_full
from cache.bad_records import reject_images
from cache.config import DataConfig
from cache.dataset import Rejection, read_split, require_few
from cache.index import EntryIndex
from cache.manifest import SHARDS, Manifest, save_manifest
from cache.parts import WHOLE, Part
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import ImageRef, Record
from cache.scan import ImageScanner
from cache.scan_note import ScanNote
from cache.split_files import load_split
from cache.split_images import SplitImage
from cache.split_lists import known_images, require_same_images

_BLOCK_BYTES = 512  # of st_blocks, on every file system


@dataclass(frozen=True, slots=True)
class Plan:
    """The work for one split.

    Attributes:
        path: where the split lies.
        root: what the image names are relative to.
        num_records: rows of the dataset.
        records: the usable ones.
        images: every usable image path of the split.
        refused: image path -> why it cannot be used.
        todo: the distinct images of this part that are not committed yet, with where to read them.
        rejected: the records left out.
        image_tokens: of all distinct images.
        todo_bytes: what `todo` will take on disk.
        missing_bytes: what all parts together have still to write.
        part: which part of several this is.
    """

    split: str
    folder: Path
    path: str
    root: str
    num_records: int
    records: tuple[Record, ...]
    images: list[SplitImage]
    refused: dict[str, str]
    todo: list[tuple[SplitImage, ImageRef]]
    rejected: list[Rejection]
    image_tokens: int
    todo_bytes: int
    missing_bytes: int
    part: Part = WHOLE

    @property
    def num_distinct(self) -> int:
        """Distinct images by content."""
        return len({image.key for image in self.images})

    def describe(self) -> str:
        """What would be done, in lines for a person."""
        others = f" by {self.part.name}; {self.missing_bytes / 1e6:.2f} MB by all parts" if self.part.of_several else ""
        free, unfinished = free_bytes(self.folder), unfinished_bytes(self.folder)
        refused = ", which is not enough: the run would be refused" if self.missing_bytes > free else ""
        held = f"; unfinished shards hold {unfinished / 1e6:.0f} MB" if unfinished else ""
        return (
            f"split {self.split}: {self.num_records} records, {len(self.rejected)} to leave out, "
            f"{self.num_distinct} distinct images, {self.image_tokens} image tokens\n"
            f"  to encode   {len(self.todo)} images, {self.todo_bytes / 1e6:.2f} MB{others}\n"
            f"  free        {free / 1e6:.0f} MB{refused}{held}\n"
            f"  cache       {self.folder}"
        )

    def require_space(self) -> None:
        """Refuse before anything is spent when the disk cannot take what all parts have still to write.

        Raises:
            ResourceError: says what is needed and what is free, in GB.
        """
        free, unfinished = free_bytes(self.folder), unfinished_bytes(self.folder)
        if self.missing_bytes <= free:
            return
        what = f"{gb(self.missing_bytes)} GB are needed, {gb(free)} GB are free"
        if not unfinished:
            raise disk_full(self.folder, what)
        raise disk_full(
            self.folder,
            f"{what}, and {gb(unfinished)} GB are held by unfinished shards, of runs that were killed or are at work",
            instead="where no run is at work, `pipeline prune --leftovers --yes` frees those that are older than an "
            "hour (their images are encoded anew)",
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
    part: Part = WHOLE,
    should_stop: Callable[[], bool] = lambda: False,
    keep_scan: bool = False,
) -> Plan:
    """Read the records, look at each image's header and hash, and find what is still to do (in this part).

    Args:
        should_stop: asked between two images.
        keep_scan: note what was hashed, so that a later call need not do it again (see ScanNote).

    Raises:
        DataError: a record or an image cannot be used, and `data.on_bad_record` is `fail` or too many are bad.
        CacheError: the cache has a list of this split with the images of another dataset.
        ReadError: an image file that is there cannot be read.
        StoppedError: `should_stop` said so.
    """
    read = read_split(data, split)
    there, note = load_split(folder, split), ScanNote(folder, split, read.root)
    known = [*known_images(read.records, there, read.root, progress), *note.load()]

    def keep(hashed: list[SplitImage]) -> None:
        save_manifest(folder, manifest)  # a folder without one is nobody's: `pipeline prune` could not tell whose
        note.save(hashed)

    scanner = ImageScanner(processor, known, max_image_pixels, keep if keep_scan else lambda _: None)
    scanned = scanner.scan(read.records, progress, should_stop)
    refused = {image.ref.path: image.error for image in scanned if image.error is not None}
    rejected = [*read.rejected, *reject_images(read.records, refused, data)]
    require_few(rejected, read.total, data, read.path)
    require_same_images(there, [image.listed for image in scanned if image.listed is not None], read.root)
    distinct = {image.listed.key: (image.listed, image.ref) for image in scanned if image.listed is not None}
    images = list(distinct.values())
    missing = [images[place] for place in EntryIndex.open(folder).missing(list(distinct))]
    todo = [image for image in missing if part.has(image[0].key)]
    tokens = _Tokens(processor, manifest.bytes_per_token())
    left_out = {r.source for r in rejected}
    return Plan(
        split=split,
        folder=folder,
        path=read.path,
        root=read.root,
        num_records=read.total,
        records=tuple(record for record in read.records if record.source not in left_out),
        images=[image.listed for image in scanned if image.listed is not None],
        refused={path: error.what for path, error in refused.items()},
        todo=todo,
        rejected=rejected,
        image_tokens=tokens.of(images),
        todo_bytes=tokens.bytes_of(todo),
        missing_bytes=tokens.bytes_of(missing),
        part=part,
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Image tokens and bytes of listed images."""

    processor: ImageProcessor
    bytes_per_token: int

    def of(self, images: Iterable[tuple[SplitImage, ImageRef]]) -> int:
        """Image tokens."""
        return sum(self.processor.num_tokens(image.image_grid_thw) for image, _ in images)

    def bytes_of(self, images: Iterable[tuple[SplitImage, ImageRef]]) -> int:
        """Bytes on disk."""
        return self.of(images) * self.bytes_per_token


def gb(count: int) -> str:
    """Bytes as GB with three significant digits, so that a small need does not read as none."""
    return f"{count / 1e9:.3g}"


def unfinished_bytes(folder: Path) -> int:
    """What shards take that are not committed. Their writers may be at work, so only `pipeline prune` deletes them."""
    found = 0
    for file in (folder / SHARDS).glob(f"*{TEMPORARY_MARK}*"):
        with suppress(FileNotFoundError):  # committed meanwhile
            found += file.stat().st_blocks * _BLOCK_BYTES
    return found


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
    return shutil.disk_usage(next(p for p in [folder, *folder.absolute().parents] if p.exists())).free
