"""Training from the cache on images that are not those that were cached: refused, as far as they are there to see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache import split_lists
from cache.records import ImageRef

from .conftest import draw, record

LONG_AGO = (1_600_000_000, 1_600_000_000)


@pytest.fixture
def train(run: Callable[..., Any]) -> Callable[..., Any]:
    """Everything that training reads before its first step."""
    return lambda config, *sets: run(
        "train", "--config", config, "--from-cache", "--dry-run", *(f"--set={text}" for text in sets)
    )


def other_dataset(folder: Path, target: Path, size: tuple[int, int] = (50, 50)) -> Path:
    """The same rows over other images of the same names."""
    target.mkdir()
    for number in range(3):
        draw(target / f"good{number}.png", size)
    return Path(shutil.copy(folder / "train.jsonl", target))


def test_the_images_of_another_dataset(train: Callable[..., Any], cached: Path, folder: Path, tmp_path: Path) -> None:
    rows = other_dataset(folder, tmp_path / "other")
    places = (str(folder), str(tmp_path / "other"))
    train(cached, f"data.splits.train={rows}").check_refusal(4, *places, "good0.png is another image", "output_dir")


def test_a_copy_in_which_an_image_was_changed(
    train: Callable[..., Any], run: Callable[..., Any], cached: Path, folder: Path, tmp_path: Path
) -> None:
    """A bad record, as where it was changed in its place; and what is advised against it helps."""
    shutil.copytree(folder, tmp_path / "copy")
    draw(tmp_path / "copy" / "good1.png", (50, 50))
    rows = f"data.splits.train={tmp_path / 'copy' / 'train.jsonl'}"
    said = ("good1.png", "has changed since it was cached", "for this split takes it up")
    train(cached, rows).check_refusal(3, "train.jsonl:2", *said)
    assert run("cache", "--config", cached, "--split", "train", f"--set={rows}").code == 0
    assert train(cached, rows).code == 0


def test_rows_that_were_copied_without_their_images(
    train: Callable[..., Any], cached: Path, folder: Path, tmp_path: Path
) -> None:
    rows = Path(shutil.copy(folder / "train.jsonl", tmp_path / "train.jsonl"))
    assert train(cached, f"data.splits.train={rows}").code == 0


def test_only_some_images_of_a_copy_are_read(
    train: Callable[..., Any], cached: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_lists, "HASHED", 2)
    read: list[str] = []
    whole = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: read.append(self.path) or whole(self))
    shutil.copytree(folder, tmp_path / "copy")

    assert train(cached, f"data.splits.train={tmp_path / 'copy' / 'train.jsonl'}").code == 0
    assert sorted(read) == ["good0.png", "good2.png"]


def test_a_dataset_that_was_copied_is_the_same(
    train: Callable[..., Any], cached: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert train(cached, f"data.splits.train={tmp_path / 'copy' / 'train.jsonl'}").code == 0


def test_no_image_file_is_needed(train: Callable[..., Any], cached: Path, folder: Path) -> None:
    for file in folder.glob("*.png"):
        file.unlink()
    assert train(cached).code == 0


def test_an_image_that_was_changed_since(
    train: Callable[..., Any], run: Callable[..., Any], cached: Path, folder: Path
) -> None:
    os.utime(folder / "good0.png", LONG_AGO)  # another time, the same content
    assert train(cached).code == 0
    draw(folder / "good1.png", (50, 50))
    train(cached).check_refusal(3, "train.jsonl:2", "good1.png", "the file has changed since it was cached")
    report = ("data.on_bad_record=report", "data.max_bad_share=0.5")
    assert "2 samples, 1 records left out" in train(cached, *report).out
    assert run("cache", "--config", cached, "--split", "train").code == 0
    assert train(cached).code == 0


def test_a_change_of_the_content_alone(train: Callable[..., Any], cached: Path, folder: Path) -> None:
    file = folder / "good2.png"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, LONG_AGO)
    train(cached).check_refusal(3, "train.jsonl:3", "good2.png", "the file has changed since it was cached")


def test_images_in_a_parquet_file_that_was_written_anew(
    run: Callable[..., Any], train: Callable[..., Any], write_config: Callable[..., Path], folder: Path
) -> None:
    datasets = pytest.importorskip("datasets")

    def write(*names: str) -> None:
        rows = [record(name) | {"image": {"bytes": (folder / name).read_bytes(), "path": None}} for name in names]
        datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
        os.utime(folder / "rows.parquet", (LONG_AGO[0] + len(names), LONG_AGO[0] + len(names)))

    write("good0.png", "good1.png")
    config = write_config({"train": str(folder / "rows.parquet")}, train={"max_steps": 1, "eval_split": None})
    assert run("cache", "--config", config, "--split", "train").code == 0
    assert train(config).code == 0
    write("good0.png", "good2.png", "good1.png")
    train(config).check_refusal(3, "rows.parquet[1]", "rows.parquet#1/0", "the file has changed since it was cached")
