"""The types in which Arrow tables hold images and texts: read, or refused by column and type."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cache import arrow_rows
from cache.config import DataConfig
from cache.dataset import SplitRecords, read_split
from cache.errors import DataError

BYTES = [b"one", b"two", None, b"4"]
PAIRS = [[b"a", b"bc"], [b"d", None], None, [b"ef", b"g"]]
NUMBERS = [list(content) if content is not None else None for content in BYTES]
STRUCTS = [{"bytes": content, "path": None} if content else None for content in BYTES]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(arrow_rows, "_BATCH_ROWS", 2)  # so that arrays are slices of others


def read(path: Path, **columns: Any) -> SplitRecords:
    """The records of a table of the given columns."""
    count = len(next(iter(columns.values())))
    plain = {"question": ["?"] * count, "answer": ["!"] * count}
    pq.write_table(pa.table(plain | columns), path)
    return read_split(DataConfig(splits={"train": str(path)}, on_bad_record="report", max_bad_share=1.0), "train")


def contents(records: SplitRecords) -> list[list[bytes]]:
    return [[ref.read() for ref in pickle.loads(pickle.dumps(record.images))] for record in records.records]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(BYTES, pa.binary()),
        pa.array(BYTES, pa.large_binary()),
        pa.array(BYTES, pa.binary_view()),
        pa.array(BYTES).dictionary_encode(),
        pa.array(NUMBERS, pa.list_(pa.uint8())),
        pa.array(NUMBERS, pa.large_list(pa.uint8())),
        pa.array(STRUCTS, pa.struct([("bytes", pa.binary_view()), ("path", pa.string())])),
        pa.array(STRUCTS, pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())])),
    ],
    ids=lambda column: str(column.type),
)
def test_images_in_a_column(tmp_path: Path, column: pa.Array) -> None:
    records = read(tmp_path / "a.parquet", image=column)
    assert records.rejected == ()
    assert contents(records) == [[content] if content else [] for content in BYTES]
    sizes = [[ref.stamp().size for ref in record.images] for record in records.records]  # type: ignore[union-attr]
    assert sizes == [[len(content)] if content else [] for content in BYTES]


def test_images_of_one_size_as_numbers(tmp_path: Path) -> None:
    same = [[1, 2, 3], [4, 5, 6], None, [7, 8, 9], [0, 1, 2]]
    records = read(tmp_path / "a.parquet", image=pa.array(same, pa.list_(pa.uint8(), 3)))
    assert contents(records) == [[bytes(content)] if content else [] for content in same]


def test_two_images_a_row(tmp_path: Path) -> None:
    records = read(tmp_path / "a.parquet", images=pa.array(PAIRS, pa.list_(pa.binary(), 2)))
    assert contents(records) == [[b"a", b"bc"], [], [b"ef", b"g"]]
    (rejection,) = records.rejected
    assert rejection.source.endswith("a.parquet[1]")
    assert "images[1] is null" in rejection.reason


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_texts(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["one", "two", "one"]
    column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts, kind)
    records = read(tmp_path / "a.parquet", question=column, image=column)
    assert [record.turns[0].content[1].text for record in records.records] == texts  # type: ignore[union-attr]
    assert [record.images[0].path for record in records.records] == texts


def test_a_byte_that_is_null(tmp_path: Path) -> None:
    column = pa.array([[1, None]], pa.list_(pa.uint8()))
    with pytest.raises(DataError, match="bytes is null"):
        contents(read(tmp_path / "a.parquet", image=column))


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("image", pa.array([[b"a"], [b"b"]], pa.list_view(pa.binary()))),
        ("other", pa.array([[("a", b"x")]] * 2, pa.map_(pa.string(), pa.binary()))),
    ],
)
def test_a_type_that_is_not_read_is_named_with_its_column(tmp_path: Path, name: str, column: pa.Array) -> None:
    with pytest.raises(DataError, match=rf"column '{name}' has the type {column.type}".split("<", 1)[0]) as caught:
        read(tmp_path / "a.parquet", **{name: column})
    assert str(caught.value.where).endswith("a.parquet")
    assert caught.value.do
