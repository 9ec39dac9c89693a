"""Rows of Parquet files, folders saved by `datasets`, and hub datasets. Image bytes stay on disk."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cache.errors import DataError
from cache.records import Embedded, TableState

_BATCH_ROWS = 1000
_SHARD_NAME = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}(-\w+)?\.parquet")


@dataclass(frozen=True)
class ArrowRows:
    """The rows of a memory-mapped `datasets.Dataset`.

    Attributes:
        dataset: the dataset.
        media: the columns that hold bytes, each as a dataset of that column alone.
        state: of its files.
    """

    dataset: Any
    media: dict[str, Any]
    state: TableState

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows in order; encoded bytes stand in them as empty `bytes`, so that none is read."""
        texts = [name for name in self.dataset.column_names if name not in self.media]
        for start in range(0, len(self.dataset), _BATCH_ROWS):
            rows = slice(start, min(start + _BATCH_ROWS, len(self.dataset)))
            columns: dict[str, list[Any]] = dict(self.dataset.select_columns(texts)[rows]) if texts else {}
            for name, column in self.media.items():
                chunks = column[rows].column(0).chunks
                columns[name] = [value for chunk in chunks for value in _without_bytes(chunk).to_pylist()]
            for index in range(rows.stop - rows.start):
                yield {name: columns[name][index] for name in self.dataset.column_names}

    def embedded(self, row: int, location: tuple[str | int, ...]) -> Embedded:
        """A handle on the bytes that `location` leads to from row `row`."""
        return Embedded(self.media[str(location[0])], row, location[1:], self.state)


def open_folder_or_file(path: Path, split: str) -> ArrowRows:
    """Opens a Parquet file, a folder of Parquet files, or a folder written by `datasets`' `save_to_disk`.

    Args:
        path: exists.
        split: taken of a folder that holds several.

    Raises:
        DataError: there are no such files, they cannot be read, or they hold other splits only.
    """
    import datasets

    if path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
        dataset = _loaded(lambda: datasets.load_from_disk(str(path)), str(path))
        if isinstance(dataset, dict):
            if split not in dataset:
                raise _no_such_split(split, list(dataset), str(path))
            dataset = dataset[split]
        return _arrow_rows(dataset, _files_of(dataset))
    files = _parquet_files(path, split) if path.is_dir() else [path]
    # `datasets` takes paths for patterns, and a folder may be called `data [v1]`.
    patterns = [glob.escape(str(file.absolute())) for file in files]
    return _arrow_rows(_loaded(lambda: datasets.Dataset.from_parquet(patterns), str(path), files=files), files)


def open_hub_dataset(name: str, split: str) -> ArrowRows:
    """Opens a dataset of the hub through `datasets`, which never runs code from it.

    Args:
        name: the hub id, `org/name`.
        split: which split of it.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    dataset = _loaded(lambda: datasets.load_dataset(name, split=split), name, "or a path that exists")
    return _arrow_rows(dataset, _files_of(dataset))


def _loaded(load: Any, place: str, otherwise: str = "", files: Sequence[Path] = ()) -> Any:
    import datasets

    try:
        return load()
    except (OSError, ValueError, NotImplementedError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        _refuse_columns(files, cause)
        raise DataError(
            f"the dataset cannot be read: {type(cause).__name__}: {cause}",
            where=place,
            do=" ".join(["check that it is a Parquet file, a folder of them or a hub dataset", otherwise]).strip(),
        ) from error


def _refuse_columns(files: Sequence[Path], cause: BaseException) -> None:
    """Name the column whose type `datasets` does not read, where that is what is wrong."""
    import datasets
    import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]  # ships no types
    import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]

    for file in files:
        try:
            schema = pq.read_schema(file)
        except (OSError, pa.ArrowException):
            continue
        for column in schema:
            try:
                datasets.Features.from_arrow_schema(pa.schema([column]))
            except (ValueError, NotImplementedError):
                raise DataError(
                    f"column {column.name!r} has the type {column.type}, which cannot be read",
                    where=str(file),
                    do="store it as binary (images), string or a list of them, or leave the column out",
                ) from cause


def _parquet_files(folder: Path, split: str) -> list[Path]:
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise DataError(
            "the folder holds no .parquet file", where=str(folder), do="name the folder that the files lie in"
        )
    matches = {file: _SHARD_NAME.fullmatch(file.name) for file in files}
    splits = {match["split"] for match in matches.values() if match}
    if len(splits) > 1:
        # As hub datasets are laid out: reading all files would mix the splits without a word.
        files = [file for file, match in matches.items() if match and match["split"] == split]
        if not files:
            raise _no_such_split(split, sorted(splits), str(folder))
    return files


def _no_such_split(split: str, splits: list[str], place: str) -> DataError:
    return DataError(
        f"no split {split!r}; there are: {', '.join(map(str, splits))}", where=place, do="set hub_split to one of them"
    )


def _files_of(dataset: Any) -> list[Path]:
    return [Path(file["filename"]) for file in dataset.cache_files]


def _arrow_rows(dataset: Any, files: Sequence[Path]) -> ArrowRows:
    types = {field.name: field.type for field in dataset.with_format("arrow")[:0].schema}
    media = [name for name, kind in types.items() if _holds_bytes(kind)]
    columns = {name: dataset.select_columns([name]).with_format("arrow") for name in media}
    return ArrowRows(dataset, columns, _state_of(files))


def _state_of(files: Sequence[Path]) -> TableState:
    # Rows are numbered through all files: one that is not the newest moves those behind it when it goes or is replaced.
    states = [(file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    if not states:
        return TableState()
    digest = xxhash.xxh3_64_intdigest(json.dumps(states).encode()) >> 2  # a list of images has it as a time in ns
    return TableState(digest or 1, max(changed for _, _, changed in states))


def _pyarrow() -> Any:
    import pyarrow  # type: ignore[import-untyped, unused-ignore]  # ships no types

    return pyarrow


def _holds_bytes(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_struct(kind):
        return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))
    return _is_bytes(kind) or (_is_list(kind) and _holds_bytes(kind.value_type))


def _is_list(kind: Any) -> bool:
    types = _pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_bytes(kind: Any) -> bool:
    """Also lists of bytes as numbers, as which some writers store an image."""
    types = _pyarrow().types
    kinds = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in kinds) or (_is_list(kind) and bool(types.is_uint8(kind.value_type)))


def _without_bytes(array: Any) -> Any:
    """`array` with every non-null bytes value made empty. Reads validity bits and offsets, never the bytes."""
    pa, kind = _pyarrow(), array.type
    if _is_bytes(kind):
        return pa.array([b"" if valid else None for valid in array.is_valid().to_pylist()], pa.binary())
    if not _holds_bytes(kind):
        return array
    if pa.types.is_struct(kind):
        fields = [_without_bytes(array.field(index)) for index in range(kind.num_fields)]
        names = [kind.field(index).name for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, names=names, mask=array.is_null())
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        values = _without_bytes(array.values.slice(array.offset * size, len(array) * size))
        return pa.FixedSizeListArray.from_arrays(values, size, mask=array.is_null())
    # `values` ignores that the array may be a slice of a longer one; the offsets do not.
    offsets = array.offsets.to_numpy()
    values = _without_bytes(array.values.slice(offsets[0], offsets[-1] - offsets[0]))
    return type(array).from_arrays(pa.array(offsets - offsets[0]), values, mask=array.is_null())
