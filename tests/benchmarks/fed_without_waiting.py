"""How long a training step waits for features that are read from a real cache, cold, in every format.

The step itself is simulated: a pause of --step seconds (default 0.6: 36 samples over 4 images of 40 MiB at the 8B take
17.9 ms a sample on an H200, docs/benchmarks/training.md). Everything before it is real: the cache, the data loader and
its workers, checksums, packing, the way between processes. Only the loader's thread that pins memory needs a GPU: here
a thread stands in for it, which receives the steps and copies their features (--no-thread leaves it out).

`python -m tests.benchmarks.fed_without_waiting [--folder DIR] [--steps 18] [--step 0.6] [--rate 400] [--workers 2]`
writes a table to standard output. Takes 1 GB below DIR and removes it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.files import LocalFiles
from cache.fingerprint import Fingerprint
from cache.formats import FORMATS
from cache.formats.extents import ShardFile
from cache.index_table import ShardStamp
from cache.manifest import SHARDS
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.remote import find_cache_at
from tests.benchmarks.shard_reading import drop_page_cache, make_cache
from tests.range_server import Handler, Site
from train.chat import EncodedText
from train.features import CachedSource, StepImage
from train.sample import Sample, SampleImage, make_sample
from train.step import Step
from train.step_dataset import StepDataset
from train.step_loader import StepLoader, make_loader
from train.throughput import Throughput

IMAGES, QUESTIONS, TEXT_TOKENS = 4, 9, 120  # of a step, an image, a question
GRID, MERGE, IMAGE_TOKEN = (1, 64, 80), 2, 1
ENTRY_BYTES = 40 << 20
PIECE = 4 << 20
WARM_UP = 4  # steps, in which workers start and fetch ahead; not measured


class Bucket:
    """Lets bytes pass at a rate, all processes together."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = multiprocessing.Value("d", 0.0)

    def take(self, size: int) -> None:
        """Wait until so many bytes may have passed."""
        with self._free_at.get_lock():
            self._free_at.value = max(self._free_at.value, time.monotonic()) + size / self._rate
            until = self._free_at.value
        time.sleep(max(0.0, until - time.monotonic()))


class ThrottledFile(ShardFile):
    """A shard on a disk of a given rate."""

    def __init__(self, path: Path, bucket: Bucket) -> None:
        super().__init__(path)
        self._bucket = bucket

    def fill(self, target: memoryview, offset: int) -> None:
        """See ShardFile."""
        for start in range(0, target.nbytes, PIECE):
            piece = target[start : start + PIECE]
            self._bucket.take(piece.nbytes)
            super().fill(piece, offset + start)


class ThrottledFiles(LocalFiles):
    """A cache on such a disk."""

    def __init__(self, folder: Path, rate: float) -> None:
        super().__init__(folder)
        self._bucket = Bucket(rate)

    def shard(self, stamp: ShardStamp) -> ShardFile:
        """See CacheFiles."""
        return ThrottledFile(self.folder / SHARDS / stamp.shard, self._bucket)


class PacedHandler(Handler):
    """Sends ranges of files at a rate, all connections together."""

    bucket: Bucket

    def do_GET(self) -> None:  # noqa: N802
        """Small files are sent as they are."""
        wanted = self.headers.get("Range")
        if wanted is None:
            super().do_GET()
            return
        with (self.site.folder / self.path.lstrip("/")).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - first))
            self.end_headers()
            while first <= last:
                piece = min(PIECE, last + 1 - first)
                self.bucket.take(piece)
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, piece)


def serve(folder: Path, rate: float, address: Any) -> None:
    """A server in a process of its own; tells its port."""
    handler = type("Paced", (PacedHandler,), {"site": Site(folder), "bucket": Bucket(rate)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    address.put(server.server_address[1])
    server.serve_forever()


class ColdSource(CachedSource):
    """Has the kernel forget the shards before each image, so that all are read from the disk."""

    def __init__(self, cache: FeatureCache, folder: Path) -> None:
        super().__init__(cache)
        self._folder = folder

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        drop_page_cache(self._folder)
        return super().load(image)


def make_samples(images: int, steps: int) -> list[Sample]:
    """Steps of 4 images with 9 questions each; images come again, in another order."""
    generator = np.random.default_rng(0)
    order: list[int] = []
    while len(order) < IMAGES * steps:
        order += random.Random(len(order)).sample(range(images), images)
    samples = []
    for number in order[: IMAGES * steps]:
        image = SampleImage(f"{number:064x}", GRID, ImageRef(f"{number}.jpg"))
        for _ in range(QUESTIONS):
            ids = generator.integers(10, 1000, TEXT_TOKENS)
            ids[:3] = 2, IMAGE_TOKEN, 3
            text = EncodedText(ids, np.where(np.arange(TEXT_TOKENS) > 100, 1.0, 0.0).astype(np.float32), (0,))
            samples.append(make_sample(text, (image,), merge_size=MERGE, source="-"))
    return samples


def received(loader: StepLoader) -> Iterator[Step]:
    """The loader's steps, taken from it and copied by a thread, as its pin-memory thread does where there is a GPU."""
    ready: queue.Queue[Step] = queue.Queue(maxsize=2)

    def receive() -> None:
        for step in loader:
            for image in step.images:
                for tensor in image.features.tensors().values():
                    tensor.clone()
            ready.put(step)

    threading.Thread(target=receive, daemon=True).start()
    for _ in range(len(loader)):
        yield ready.get()


def measure(source: CachedSource, samples: list[Sample], options: argparse.Namespace) -> tuple[float, float]:
    """Data-wait share after the warm-up, and seconds until the first step."""
    steps = StepDataset(
        samples,
        source,
        effective_batch_size=IMAGES * QUESTIONS,
        tokens_per_pack=1 << 20,
        image_token_id=IMAGE_TOKEN,
        merge_size=MERGE,
        seed=None,
        blocks=True,
    )
    loader = make_loader(
        steps, num_workers=options.workers, pin_memory=True, prefetch_factor=2, persistent_workers=False
    )
    throughput = Throughput(torch.device("cpu"))
    batches = iter(loader) if options.no_thread else received(loader)
    started, first = time.perf_counter(), 0.0
    for number in range(len(steps)):
        with throughput.waiting():
            step = next(batches)
        assert len(step.images) == IMAGES
        throughput.count(step)
        if number == 0:
            first = time.perf_counter() - started
        time.sleep(options.step)
        del step  # unmapping its memory is no waiting; with a GPU the thread that pins does it
        if number + 1 == WARM_UP:
            throughput.pause()
    return throughput.report(0)["data_wait_share"], first


def over_http(folder: Path, rate: float, use: Callable[[FeatureCache], None]) -> None:
    """Run `use` on a cache that a server of that rate serves."""
    context = multiprocessing.get_context("fork")
    address = context.Queue()
    server = context.Process(target=serve, args=(folder, rate, address), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{address.get(timeout=30)}"
        use(find_cache_at(url, Fingerprint({"dtype": "bfloat16"}), any_backend=True))
    finally:
        server.terminate()
        server.join()


def run(folder: Path, options: argparse.Namespace) -> None:
    """A format after the other, so that no more than one cache lies on the disk."""
    samples = make_samples(options.entries, options.steps)
    rate = options.rate * 1e6
    needed = IMAGES * ENTRY_BYTES / options.step / 1e6
    print(
        f"{options.steps} simulated steps of {options.step} s, {IMAGES} images of 40 MiB and {IMAGES * QUESTIONS} "
        f"samples each ({needed:.0f} MB/s), {options.workers} workers, {os.cpu_count()} CPUs, "
        "page cache dropped before each image"
    )
    print("\n| features from | data wait after 4 steps | first step after |\n|---|---|---|")
    for name in FORMATS:
        made = make_cache(folder, name, options.entries)

        def row(what: str, cache: FeatureCache, made: Path = made) -> None:
            share, first = measure(ColdSource(cache, made), samples, options)
            print(f"| {what} | {100 * share:.2f} % | {first:.2f} s |", flush=True)

        row(f"{name}, disk", FeatureCache(made))
        throttled = ThrottledFiles(made, rate)
        row(f"{name}, disk throttled to {options.rate:.0f} MB/s", FeatureCache(throttled))
        if name == "webdataset":
            over_http(made, rate, lambda cache: row(f"webdataset, HTTP at {options.rate:.0f} MB/s", cache))
        shutil.rmtree(made)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--entries", type=int, default=24)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--step", type=float, default=0.6, help="seconds that a simulated training step takes")
    parser.add_argument("--rate", type=float, default=400.0, help="MB/s of the throttled source")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-thread", action="store_true", help="receive the steps in the training loop itself")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        run(folder, options)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
