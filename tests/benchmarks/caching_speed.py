"""`pipeline cache` end to end, JPEG on disk to committed shard, against the tower alone and the disk alone.

    python -m tests.benchmarks.caching_speed --dir /a/fast/disk --tower fast
    python -m tests.benchmarks.caching_speed --dir /dev/shm/x --gpus 2 --tower fast
    python -m tests.benchmarks.caching_speed --dir /dev/shm/x --tower fast --attention flash_attention_4
    python -m tests.benchmarks.caching_speed --dir /dev/shm/x --tower fast --shapes mixed
    python -m tests.benchmarks.caching_speed --dir /dev/shm/x --tower fast --image-processor-device cuda
    python -m tests.benchmarks.caching_speed --dir somewhere --tiny        # on a CPU, to try the command

JPEGs of 1036x1288 and a checkpoint with the 8B's tower (random weights, 1.2 GB) are made below --dir, where the cache
goes as well: 40 MiB an image. The caches are deleted again. `--shapes mixed`: images of several shapes, so that a batch
is filled by its patches and compiled code meets new shapes; the tower alone is then the mean over the images. The
steady rate of a process is what it commits from its first shard on, divided by that time; the whole rate includes
starting, loading the tower and compiling.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from PIL import Image

from cache.config import CacheConfig, ModelConfig
from cache.patches import Normalizer, cut
from cache.preprocess import ImageProcessor, decode
from cache.vision_tower import VisionTower
from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.true_shapes import HEIGHT, WIDTH
from tests.benchmarks.true_tower import make_tower_checkpoint

PATCHES = 64 * 80  # of an image
SHAPES = {  # width, height
    "one": [(WIDTH, HEIGHT)],
    "mixed": [(WIDTH, HEIGHT), (HEIGHT, WIDTH), (1280, 720), (1920, 1080), (800, 600), (640, 480), (300, 1200)],
}
TINY = 8  # so many times smaller a side
WARM_UP, ROUNDS = 3, 8
PIPELINE = (sys.executable, "-c", "from pipeline.cli import main; main()")


@dataclass(frozen=True)
class Outcome:
    """One run of the command: seconds, images/s, bytes."""

    processes: int
    seconds: float
    until_first_shard: float
    whole: float
    steady: float
    bytes_per_image: float


def main() -> None:
    """Make what is needed, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--gpus", type=int, default=1, help="Also with so many processes, one a GPU.")
    parser.add_argument("--tower", default="stock", choices=["stock", "fast"])
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "flash_attention_4"])
    parser.add_argument("--shapes", default="one", choices=list(SHAPES))
    parser.add_argument("--batch", type=int, default=None, help="Images at once. Default: 8 for fast, 1 for stock.")
    parser.add_argument("--workers", type=int, default=4, help="cache.num_workers, for each process.")
    parser.add_argument("--image-processor-device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--format", default="safetensors")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    work = arguments.dir
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = (
        make_tiny_checkpoint(work / "model") if arguments.tiny else make_tower_checkpoint(work / "model", device="cuda")
    )
    sizes = [(w // TINY, h // TINY) if arguments.tiny else (w, h) for w, h in SHAPES[arguments.shapes]]
    rows = make_images(work / "data", arguments.images, sizes)
    section = settings(arguments)
    disk = plain_write_rate(work, 64 << 20 if arguments.tiny else 4 << 30)
    tower = tower_rate(checkpoint, section, rows.parent / "images")
    outcomes = [run(work, checkpoint, rows, section, count) for count in sorted({1, arguments.gpus})]
    lines = report(arguments, disk, tower, outcomes)
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    shutil.rmtree(work / "data")
    shutil.rmtree(work / "model")


def settings(arguments: argparse.Namespace) -> dict[str, object]:
    """The configuration's cache section."""
    batch = arguments.batch or _batch(arguments.tower)
    section: dict[str, object] = {
        "tower": arguments.tower,
        "attn_implementation": arguments.attention,
        "num_workers": arguments.workers,
        "format": arguments.format,
        "image_processor_device": arguments.image_processor_device,
        "patches_per_batch": None if batch == 1 else batch * PATCHES // (TINY**2 if arguments.tiny else 1),
    }
    # Small shards so that a tiny run has several, as a large one has.
    return section | ({"shard_size": 1 << 20, "device": "cpu"} if arguments.tiny else {})


def _batch(tower: str) -> int:
    return 8 if tower == "fast" else 1


def make_images(folder: Path, count: int, sizes: list[tuple[int, int]]) -> Path:
    """Distinct JPEGs, of about 400 kB a megapixel, of the sizes in turn, a question each; returns the JSONL file."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    bases = []
    for number in range(8 if len(sizes) == 1 else len(sizes)):
        size = sizes[number % len(sizes)]
        noise = torch.randint(0, 256, (size[1] // 5, size[0] // 5, 3), generator=generator, dtype=torch.uint8)
        bases.append(Image.fromarray(noise.numpy()).resize(size, Image.Resampling.BICUBIC))

    def write(number: int) -> str:
        image = bases[number % len(bases)].copy()
        colour = (number % 16 * 16, number // 16 % 16 * 16, number // 256 % 16 * 16)  # far enough apart for JPEG
        left = number // 4096 * 16
        image.paste(colour, (left, 0, left + 16, 16))
        name = f"images/{number:05d}.jpg"
        image.save(folder / name, quality=82)
        return json.dumps({"image": name, "question": "What is it?", "answer": "Noise."})

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rows = list(threads.map(write, range(count)))
    file = folder / "train.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def plain_write_rate(folder: Path, size: int) -> float:
    """Bytes/s of one file written from memory and flushed."""
    content = memoryview(os.urandom(16 << 20))
    file = folder / "plain"
    started = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        for _ in range(size // content.nbytes):
            out.write(content)
        os.fsync(out.fileno())
    seconds = time.perf_counter() - started
    file.unlink()
    return size / seconds


def tower_rate(checkpoint: Path, section: dict[str, object], images: Path) -> float:
    """Images/s of the tower alone, pixels on its device, of each shape the median batch."""
    model = ModelConfig(name_or_path=str(checkpoint))
    cache = CacheConfig.model_validate(section | {"image_processor_device": "cpu"})
    processor = ImageProcessor.from_checkpoint(model, cache)
    tower = VisionTower.load(model, cache)
    normalize = Normalizer(processor, tower.device)
    by_size: dict[tuple[int, int], list[Path]] = {}
    for file in sorted(images.iterdir()):
        with Image.open(file) as image:
            by_size.setdefault(image.size, []).append(file)
    seconds = 0.0
    for files in by_size.values():
        values, grids = [], []
        for file in files:
            patches, grid = cut(processor, decode(file.read_bytes(), where=file.name, max_image_pixels=10**9), where="")
            if len(values) >= max(1, (cache.patches_per_batch or 0) // int(grid.prod())):
                break
            values.append(normalize(patches))
            grids.append(grid)
        seconds += len(files) * seconds_of_a_batch(tower, values, grids) / len(values)
    del tower, values
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return sum(map(len, by_size.values())) / seconds


def seconds_of_a_batch(tower: VisionTower, values: list[torch.Tensor], grids: list[torch.Tensor]) -> float:
    """The median."""
    times = []
    for _ in range(WARM_UP + ROUNDS):
        started = time.perf_counter()
        tower.encode(values, grids)
        if tower.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])


def run(work: Path, checkpoint: Path, rows: Path, section: dict[str, object], processes: int) -> Outcome:
    """The command as a user gives it, into a fresh folder."""
    features = work / "features"
    shutil.rmtree(features, ignore_errors=True)
    config = {
        "model": str(checkpoint),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(work / "run"),
        "cache": {**section, "dir": str(features)},
    }
    file = work / "my.yaml"
    file.write_text(yaml.safe_dump(config))
    more = ["--gpus", str(processes)] if processes > 1 else []
    started = time.time()
    subprocess.run([*PIPELINE, "cache", "--config", str(file), "--split", "train", *more], check=True)
    seconds = time.time() - started
    commits: dict[int, list[tuple[float, int]]] = {}
    for index in features.glob("*/shards/*.json"):
        entries = json.loads(index.read_text())["entries"]
        part = int(entries[0]["key"][:16], 16) % processes
        commits.setdefault(part, []).append((index.stat().st_mtime, len(entries)))
    written = sum(file.stat().st_size for file in features.glob("*/shards/*"))
    shutil.rmtree(features)
    shutil.rmtree(work / "run")
    first = max(min(shards)[0] for shards in commits.values())
    count = sum(number for shards in commits.values() for _, number in shards)
    return Outcome(
        processes, seconds, first - started, count / seconds, sum(map(_steady, commits.values())), written / count
    )


def _steady(shards: list[tuple[float, int]]) -> float:
    """Images/s of one process from its first commit to its last; nan when there is one commit only."""
    shards = sorted(shards)
    span = shards[-1][0] - shards[0][0]
    return sum(number for _, number in shards[1:]) / span if span else float("nan")


def report(arguments: argparse.Namespace, disk: float, tower: float, outcomes: list[Outcome]) -> list[str]:
    """The tables as Markdown."""
    import transformers

    device = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    size = outcomes[0].bytes_per_image
    lines = [
        f"{device}, torch {torch.__version__}, transformers {transformers.__version__}; {arguments.images} images, "
        f"{arguments.shapes} shape(s), tower {arguments.tower}, {arguments.attention}, "
        f"{arguments.batch or _batch(arguments.tower)} of 5120 patches at once, {arguments.workers} decoding "
        f"processes for each GPU, resized on {arguments.image_processor_device}, {arguments.format}, "
        f"below {arguments.dir}",
        "",
        f"Plain write, flushed: {disk / 1e9:.2f} GB/s = {disk / size:.1f} images/s. Tower alone: {tower:.1f} images/s.",
        "",
        "| processes | whole, s | until the first shard, s | whole, images/s | steady, images/s | steady / slower of "
        "tower and disk | steady / 1 process |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        limit = min(one.processes * tower, disk / size)
        lines.append(
            f"| {one.processes} | {one.seconds:.1f} | {one.until_first_shard:.1f} | {one.whole:.1f} | {one.steady:.1f} "
            f"| {one.steady / limit:.2f} | {one.steady / outcomes[0].steady:.2f} |"
        )
    return lines


if __name__ == "__main__":
    main()
