"""The drawn dataset must be the same everywhere and must not leak val images into train."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from pipeline.demo.screenshots import COLOURS, SIZES, STOPS, TITLES, make_screenshots


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screenshots")
    make_screenshots(folder, train_images=100, val_images=40)
    return folder


def rows(folder: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_same_seed_gives_the_same_files(folder: Path, tmp_path: Path) -> None:
    make_screenshots(tmp_path / "again", train_images=100, val_images=40)
    make_screenshots(tmp_path / "other", train_images=100, val_images=40, seed=1)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.*"))
    assert len(names) == 142
    assert all((folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)
    assert all((folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes() for name in names)


def test_rows_are_flat_vqa_and_val_images_are_new(folder: Path) -> None:
    train, val = rows(folder, "train"), rows(folder, "val")
    assert (len(train), len(val)) == (400, 160)
    assert len({row["id"] for row in train + val}) == 560
    assert all(set(row) == {"id", "image", "question", "answer"} and all(row.values()) for row in train + val)
    pixels = {}
    for row in train + val:
        with Image.open(folder / row["image"]) as image:
            assert image.mode == "RGB"
            assert image.size in SIZES
            pixels[row["image"]] = image.tobytes()
    assert len(set(pixels.values())) == len(pixels) == 140


def test_answers_are_those_of_the_image(folder: Path) -> None:
    for row in rows(folder, "val"):
        with Image.open(folder / row["image"]) as image:
            if "colour" in row["question"]:
                place = (12 if "left" in row["question"] else 76, 24)
                assert image.getpixel(place) == COLOURS[row["answer"]]
            elif "slider" in row["question"]:
                x, y = json.loads(row["answer"].replace("(", "[").replace(")", "]"))
                assert [stop for stop in STOPS if image.getpixel((stop, y)) == (255, 255, 255)] == [x]
            else:
                assert row["answer"] in TITLES


def test_guessing_without_the_image_fails(folder: Path) -> None:
    train, val = rows(folder, "train"), rows(folder, "val")
    usual = {
        question: Counter(row["answer"] for row in train if row["question"] == question).most_common(1)[0][0]
        for question in {row["question"] for row in train}
    }
    assert sum(usual[row["question"]] == row["answer"] for row in val) / len(val) <= 0.35
