"""Splits with images in common are cached one after another; which ones they are is read off the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import pytest

from cache.config import DataConfig
from cache.errors import DataError
from pipeline.chain_shared import splits_before
from pipeline.time_measured import CALIBRATION
from pipeline.time_records import Phase, TimeRecord

from .conftest import record


def _rows(file: Path, *images: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(record(image))}\n" for image in images))
    return str(file)


def _data(**splits: Any) -> DataConfig:
    return DataConfig.model_validate({"splits": splits})


def test_images_are_one_by_their_files_which_need_not_be_there(tmp_path: Path) -> None:
    data = _data(
        train=_rows(tmp_path / "train.jsonl", "a.png", "b.png"),
        val=_rows(tmp_path / "val.jsonl", "c.png", "sub/../b.png"),
        other=_rows(tmp_path / "elsewhere" / "other.jsonl", "a.png", "b.png", "c.png"),
        rooted={"path": _rows(tmp_path / "elsewhere" / "r.jsonl", "c.png", "a.png"), "image_root": str(tmp_path)},
    )

    assert splits_before(data, list(data.splits)) == {"val": ("train",), "rooted": ("train", "val")}
    assert splits_before(data, ["rooted", "other", "val"]) == {"val": ("rooted",)}
    assert splits_before(data, ["train", "other"]) == {}


def test_one_split_alone_is_not_even_read(tmp_path: Path) -> None:
    data = _data(train=str(tmp_path / "none.jsonl"), val=_rows(tmp_path / "val.jsonl", "a.png"))

    assert splits_before(data, ["train"]) == {}
    with pytest.raises(DataError, match="no such file"):
        splits_before(data, ["val", "train"])


def test_embedded_images_are_one_by_their_place(tmp_path: Path) -> None:
    rows = [{**record("x"), "image": {"bytes": b"png", "path": None}}]
    for name in ("train-00000-of-00001", "val-00000-of-00001"):
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{name}.parquet")
    first, folder = str(tmp_path / "train-00000-of-00001.parquet"), str(tmp_path)
    data = _data(train=folder, val=folder, again={"path": folder, "hub_split": "train"}, one=first, two=first)

    assert splits_before(data, list(data.splits)) == {"again": ("train",), "two": ("one",)}


def test_a_chain_caches_them_one_after_another_and_its_prediction_too(
    run: Callable[..., Any], config: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    val = _rows(folder / "val.jsonl", "good2.png", "good1.png")
    sections: dict[str, Any] = {"train": {"eval_split": "val"}, "slurm": {"cache": {"num_parts": 1}}}
    file = config(record("good0.png"), record("good1.png"), **sections)
    both = ["--config", file, "--set", f"data.splits.val={val}"]
    given = TimeRecord("cache", "cpu", 1, {}, 7.0, {"encoding": Phase(10, 100.0, 100.0, 100.0)}, 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CALIBRATION).write_text(json.dumps([asdict(given)]))

    submitted = run("submit", *both, "--dry-run")
    predicted = json.loads(run("plan", *both, "--time-limit", "8h", "--json").out)["jobs"]

    assert submitted.code == 0, submitted.err
    ends = "1. cache-train, 1 tasks\n2. cache-val, 1 tasks, after cache-train\n3. check, after cache-train, cache-val\n"
    assert ends in submitted.out
    assert predicted["cache-val"]["after"] == ["cache-train"]
    # good1.png is there by then.
    seconds = [predicted[f"cache-{name}"]["seconds"]["likely"] for name in ("train", "val")]
    assert seconds[0] - seconds[1] == pytest.approx(100.0)
    _rows(folder / "val.jsonl", "good2.png")
    assert "2. cache-val, 1 tasks\n" in run("submit", *both, "--dry-run").out
