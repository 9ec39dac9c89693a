"""Goes over a split's images once: content key, size in tokens, and what cannot be used. Decodes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from cache.errors import DataError, PipelineError, StoppedError
from cache.headers import read_head
from cache.image_formats import require_format
from cache.keys import image_key
from cache.preprocess import ImageProcessor, header_size
from cache.progress import Progress
from cache.records import ImageRef, Record, Stamp, require_size
from cache.split_images import SplitImage

THREADS = 8  # hashing and reading release the GIL; more than this does not help one disk
AHEAD = 4 * THREADS  # images asked for at a time: a request to stop waits for those in hand only
KEEP_SECONDS = 60.0  # between two notes of what was hashed
HEAD_FIRST_BYTES = 16 << 20  # of a larger file the beginning is looked at first: it may be a video
RACY_NS = 2_000_000_000  # file systems keep times to within 2 s or better


@dataclass(frozen=True, slots=True)
class ScannedImage:
    """What the scan found for one image: `listed` if it can be used, else `error`."""

    ref: ImageRef
    listed: SplitImage | None
    error: DataError | None


@dataclass(frozen=True, slots=True)
class ImageScanner:
    """Scans images; knows from earlier scans which files it need not read again.

    Attributes:
        processor: tells an image's grid from its size.
        known: images that were hashed before, under the same root or one that was found to be the same.
        max_image_pixels: larger images are refused.
        keep: notes what was hashed, from time to time and at the end, also when the scan is cut short.
    """

    processor: ImageProcessor
    known: Iterable[SplitImage]
    max_image_pixels: int
    keep: Callable[[list[SplitImage]], None] = lambda _: None

    def scan(
        self, records: Iterable[Record], progress: Progress, should_stop: Callable[[], bool] = lambda: False
    ) -> list[ScannedImage]:
        """Every distinct image path of the records, in the order of first use.

        Raises:
            ReadError: a file that is there cannot be read.
            StoppedError: `should_stop` said so.
        """
        refs = {ref.path: ref for record in records for ref in record.images}
        known = {image.path: image for image in self.known}
        progress.start("reading images", len(refs), "image")
        found: list[ScannedImage] = []
        noted = _Noted(self.keep, known)
        try:
            for image in _in_order(lambda ref: self._scan_one(ref, known.get(ref.path)), refs.values()):
                found.append(image)
                noted.add(image)
                progress.advance()
                if should_stop():
                    raise StoppedError(
                        "stopped; what is known of the images so far is kept", do="run the same command to go on"
                    )
        finally:
            noted.write()
        progress.finish()
        return found

    def _scan_one(self, ref: ImageRef, known: SplitImage | None) -> ScannedImage:
        try:
            stamp = ref.stamp()
            if known and stamp and stamp.mtime_ns and (known.size, known.mtime_ns) == (stamp.size, stamp.mtime_ns):
                return ScannedImage(ref, known, None)
            return ScannedImage(ref, self._hash(ref, stamp), None)
        except DataError as error:
            if error.where != ref.path:
                error = DataError(error.what, where=ref.path, do=error.do)
            return ScannedImage(ref, None, error)

    def _hash(self, ref: ImageRef, stamp: Stamp | None) -> SplitImage:
        mtime_ns = 0
        if stamp is not None:
            _require_image(ref, stamp)
            # A file changed twice within a tick of the file system's clock looks unchanged: its time is not relied on.
            mtime_ns = stamp.mtime_ns if abs(time.time_ns() - stamp.changed_ns) > RACY_NS else 0
        data = ref.read()
        height, width = header_size(data, where=ref.path)
        if height * width > self.max_image_pixels:
            raise DataError(
                f"is {width}x{height}, more than cache.max_image_pixels = {self.max_image_pixels}",
                where=ref.path,
                do="reduce the image; if it is genuine and memory allows, raise cache.max_image_pixels",
            )
        grid = self.processor.grid_of(height, width)
        return SplitImage(path=ref.path, key=image_key(data), image_grid_thw=grid, size=len(data), mtime_ns=mtime_ns)


def _require_image(ref: ImageRef, stamp: Stamp) -> None:
    """Refuse what is no image before it is read whole."""
    require_size(stamp.size, ref.path)
    if ref.file is not None and stamp.size > HEAD_FIRST_BYTES:
        require_format(read_head(ref.file), stamp.size, where=ref.path)


class _Noted:
    """What has been hashed so far, kept at intervals."""

    def __init__(self, keep: Callable[[list[SplitImage]], None], known: dict[str, SplitImage]) -> None:
        self._keep, self._images = keep, dict(known)
        self._new, self._written = 0, time.monotonic()

    def add(self, image: ScannedImage) -> None:
        if image.listed is None or self._images.get(image.ref.path) is image.listed:
            return
        self._images[image.ref.path] = image.listed
        self._new += 1
        if time.monotonic() - self._written > KEEP_SECONDS:
            self.write()

    def write(self) -> None:
        """What is not kept is hashed again: no reason to end the scan, or to hide why it ended."""
        if self._new:
            with suppress(PipelineError, OSError):
                self._keep(list(self._images.values()))
            self._new, self._written = 0, time.monotonic()


def _in_order(work: Callable[[ImageRef], ScannedImage], refs: Iterable[ImageRef]) -> Iterator[ScannedImage]:
    """`map` by threads, a few images ahead; leaves what has not begun when it is closed or an image fails."""
    waiting: deque[Future[ScannedImage]] = deque()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for ref in refs:
                waiting.append(pool.submit(work, ref))
                if len(waiting) >= AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
