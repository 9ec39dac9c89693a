"""The digest of a split's rows: another one when a row is another, and never for another reason."""

from __future__ import annotations

import hashlib
import json
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pytest

from cache.config import DataConfig
from cache.content import rows_digest
from cache.errors import DataError


def _digest(place: Any, split: str = "train") -> str:
    return rows_digest(DataConfig.model_validate({"splits": {split: str(place)}}), split)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_text_file_counts_by_its_bytes(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    file.write_bytes(b'{"question": "\xc3\xb6"}\n')

    before = _digest(file)

    assert before == hashlib.sha256(file.read_bytes()).hexdigest()
    copy = tmp_path / f"copy{suffix}"
    copy.write_bytes(file.read_bytes())
    assert _digest(copy, "val") == before
    file.write_bytes(b'{"question": "o"}\n')
    assert _digest(file) != before


def test_parquet_counts_by_its_rows_without_images(tmp_path: Path) -> None:
    def written(name: str, answer: str, image: bytes, day: int = 1) -> Path:
        row = {"image": {"bytes": image, "path": None}, "answer": answer, "day": date(2026, 1, day)}
        datasets.Dataset.from_list([row, row]).to_parquet(tmp_path / name)
        return tmp_path / name

    first = _digest(written("a.parquet", "red", b"png"))
    assert _digest(written("b.parquet", "red", b"another file of the image")) == first
    assert _digest(written("c.parquet", "blue", b"png")) != first
    assert _digest(written("d.parquet", "red", b"png", day=2)) != first


def test_of_a_folder_the_other_splits_do_not_count(tmp_path: Path) -> None:
    for name, answer in (("train", "red"), ("val", "blue")):
        rows = datasets.Dataset.from_list([{"answer": answer}])
        rows.to_parquet(tmp_path / f"{name}-00000-of-00001.parquet")
    train, val = _digest(tmp_path), _digest(tmp_path, "val")
    datasets.Dataset.from_list([{"answer": "green"}]).to_parquet(tmp_path / "val-00000-of-00001.parquet")

    assert train != val
    assert _digest(tmp_path) == train
    assert _digest(tmp_path, "val") != val

    saved = tmp_path / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"answer": "red"}])}).save_to_disk(saved)
    assert _digest(saved) == train


def test_a_hub_dataset_counts_by_its_name() -> None:
    split = {"path": "org/name", "hub_split": "validation"}
    data = DataConfig.model_validate({"splits": {"val": split, "train": "org/name"}})

    assert [rows_digest(data, name) for name in data.splits] == ["hub:org/name:validation", "hub:org/name:train"]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"a": 1}))
    file.chmod(0)
    try:
        file.read_bytes()
    except PermissionError:
        with pytest.raises(DataError, match="cannot be read"):
            _digest(file)
