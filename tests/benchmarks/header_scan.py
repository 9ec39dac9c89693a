"""How fast a plan looks over image headers: drawn JPEG files, on one core, decoded never.

Run: python -m tests.benchmarks.header_scan [--images 20000] [--folder DIR]
     python -m tests.benchmarks.header_scan --plan [--images 100000] [--folder DIR]

--plan runs `pipeline plan` itself, from its start to its last line. Its files take less of the disk: behind the 64 KiB
that are looked at stands a hole. Copies are read whole all the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from PIL import Image

from cache.headers import Header, content_ids, read_headers
from cache.progress import Silent
from cache.records import ImageRef
from pipeline.demo.tiny_model import make_tiny_checkpoint

DUPLICATES = 0.05  # share of files that are copies of another one
SIZES = [(1036, 1288), (1280, 720), (640, 480), (1920, 1080)]
HEAD_BYTES = 64 << 10
PADDING = 300_000  # bytes behind the picture at most: a photograph's size without a photograph's drawing time


def draw(folder: Path, count: int, *, holes: bool = False) -> list[ImageRef]:
    """JPEG files of four sizes with EXIF data; each twentieth is a copy."""
    dice = random.Random(0)
    pictures = []
    for number, size in enumerate(SIZES):
        buffer = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = 1 + 5 * (number % 2)
        Image.effect_noise(size, 40).convert("RGB").save(buffer, "JPEG", quality=30, exif=exif)
        pictures.append(buffer.getvalue())
    refs: list[ImageRef] = []
    for number in range(count):
        file = folder / f"{number % 100:02d}" / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        if refs and dice.random() < DUPLICATES:
            content = dice.choice(refs).read()
        else:
            picture = dice.choice(pictures)
            # Different pictures differ early: the bytes of a comment segment in front stand for that.
            comment = b"\xff\xfe\x00\x0a" + dice.randbytes(8)
            content = picture[:2] + comment + picture[2:] + bytes(dice.randrange(PADDING))
        with file.open("wb") as opened:
            opened.write(content[:HEAD_BYTES] if holes else content)
            opened.truncate(len(content))
        refs.append(ImageRef(file.name, file=file))
    return refs


def scan(refs: list[ImageRef]) -> tuple[float, float, int]:
    """Seconds for headers and for telling contents apart, and the number of distinct images."""
    started = time.perf_counter()
    headers = read_headers(refs, Silent())
    read = time.perf_counter()
    usable = [(ref, header) for ref, header in zip(refs, headers, strict=True) if isinstance(header, Header)]
    distinct = len(set(content_ids(usable)))
    return read - started, time.perf_counter() - read, distinct


def drop_from_page_cache(refs: list[ImageRef]) -> None:
    """So that the disk is read."""
    os.sync()
    for ref in refs:
        assert ref.file is not None
        descriptor = os.open(ref.file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write_config(folder: Path, refs: list[ImageRef]) -> Path:
    """A configuration over the files, a record each."""
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for ref in refs:
            assert ref.file is not None
            image = str(ref.file.relative_to(folder))
            file.write(json.dumps({"image": image, "question": "What is it?", "answer": "noise"}) + "\n")
    config = folder / "my.yaml"
    settings = {
        "model": str(make_tiny_checkpoint(folder / "model")),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(folder / "run"),
    }
    config.write_text(yaml.safe_dump(settings))
    return config


def time_plan(config: Path) -> tuple[float, int]:
    """Seconds of the whole command, and the number of distinct images that it says."""
    started = time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("pipeline")), "plan", "--config", str(config), "--json"],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    return seconds, int(json.loads(done.stdout)["splits"]["train"]["distinct_images"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=None, help="default: 20000; with --plan 100000")
    parser.add_argument("--plan", action="store_true", help="`pipeline plan` itself")
    parser.add_argument("--folder", type=Path, help="where the files are drawn; default: a temporary folder")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    count = options.images or (100_000 if options.plan else 20_000)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        refs = draw(Path(name), count, holes=options.plan)
        total = sum(ref.file.stat().st_size for ref in refs if ref.file)
        print(f"{len(refs)} JPEG files, {total / 1e9:.2f} GB, one core")
        (report_plan if options.plan else report_scan)(Path(name), refs)


def report_plan(folder: Path, refs: list[ImageRef]) -> None:
    """Print a line for `pipeline plan` with the page cache cold, and one with it warm."""
    config = write_config(folder, refs)
    print("| page cache | `pipeline plan`, s | distinct |\n|---|---|---|")
    for state in ("cold", "warm"):
        if state == "cold":
            drop_from_page_cache(refs)
        seconds, distinct = time_plan(config)
        print(f"| {state} | {seconds:.1f} | {distinct} |", flush=True)


def report_scan(_folder: Path, refs: list[ImageRef]) -> None:
    """Print lines for the functions inside."""
    print("| page cache | headers, s | contents, s | images/s | 100,000 images, s | distinct |")
    print("|---|---|---|---|---|---|")
    for state in ("cold", "warm", "warm"):
        if state == "cold":
            drop_from_page_cache(refs)
        headers, contents, distinct = scan(refs)
        rate = len(refs) / (headers + contents)
        print(f"| {state} | {headers:.2f} | {contents:.2f} | {rate:.0f} | {1e5 / rate:.1f} | {distinct} |")


if __name__ == "__main__":
    main()
