"""Goes over a split's images once: content key, size in tokens, and what cannot be used. Decodes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cache.errors import DataError
from cache.keys import image_key
from cache.manifest import SplitImage, SplitImages
from cache.preprocess import ImageProcessor, header_size
from cache.progress import Progress
from cache.records import ImageRef, Record

THREADS = 8  # hashing and reading release the GIL; more than this does not help one disk


@dataclass(frozen=True, slots=True)
class ScannedImage:
    """What the scan found for one image: `listed` if it can be used, else `error`."""

    ref: ImageRef
    listed: SplitImage | None
    error: DataError | None


@dataclass(frozen=True, slots=True)
class ImageScanner:
    """Scans images; knows from an earlier scan which files it need not read again.

    Attributes:
        processor: tells an image's grid from its size.
        known: the split's image list of an earlier run.
        max_image_pixels: larger images are refused.
    """

    processor: ImageProcessor
    known: SplitImages | None
    max_image_pixels: int

    def scan(self, records: Iterable[Record], progress: Progress) -> list[ScannedImage]:
        """Every distinct image path of the records, in the order of first use."""
        refs = {ref.path: ref for record in records for ref in record.images}
        known = {image.path: image for image in self.known.images} if self.known else {}
        progress.start("reading images", len(refs), "image")
        found = []
        with ThreadPoolExecutor(THREADS) as pool:
            for image in pool.map(lambda ref: self._scan_one(ref, known.get(ref.path)), refs.values()):
                found.append(image)
                progress.advance()
        progress.finish()
        return found

    def _scan_one(self, ref: ImageRef, known: SplitImage | None) -> ScannedImage:
        try:
            stat = _stat(ref)
            if known and stat and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return ScannedImage(ref, known, None)
            data = ref.read()
            height, width = header_size(data, where=ref.path)
            if height * width > self.max_image_pixels:
                raise DataError(
                    f"is {width}x{height}, more than cache.max_image_pixels = {self.max_image_pixels}",
                    where=ref.path,
                    do="reduce the image; if it is genuine and memory allows, raise cache.max_image_pixels",
                )
            grid = self.processor.grid_of(height, width)
            mtime = stat.st_mtime_ns if stat else 0
            listed = SplitImage(path=ref.path, key=image_key(data), image_grid_thw=grid, size=len(data), mtime_ns=mtime)
            return ScannedImage(ref, listed, None)
        except DataError as error:
            if error.where != ref.path:
                error = DataError(error.what, where=ref.path, do=error.do)
            return ScannedImage(ref, None, error)


def _stat(ref: ImageRef) -> os.stat_result | None:
    """Size and modification time; None when there is no file to ask, and reading it will say why."""
    try:
        return ref.file.stat() if ref.file is not None else None
    except OSError:
        return None
