"""How fast a plan looks over image headers: 20,000 drawn JPEG files, on one core, decoded never.

Run: python tests/benchmarks/header_scan.py [--images 20000] [--folder DIR]
"""

from __future__ import annotations

import argparse
import io
import os
import random
import tempfile
import time
from pathlib import Path

from PIL import Image

from cache.headers import Header, content_ids, read_headers
from cache.progress import Silent
from cache.records import ImageRef

DUPLICATES = 0.05  # share of files that are copies of another one
SIZES = [(1036, 1288), (1280, 720), (640, 480), (1920, 1080)]
PADDING = 300_000  # bytes behind the picture at most: a photograph's size without a photograph's drawing time


def draw(folder: Path, count: int) -> list[ImageRef]:
    """JPEG files of 50 to 350 kB with EXIF data; each twentieth is a copy."""
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
        file.write_bytes(content)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="where the files are drawn; default: a temporary folder")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        refs = draw(Path(name), options.images)
        total = sum(ref.file.stat().st_size for ref in refs if ref.file)
        print(f"{len(refs)} JPEG files, {total / 1e9:.2f} GB, one core")
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
