"""A split of the dataset -> its records. Reads texts and image names, no images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from cache.arrow_rows import ArrowRows, open_folder_or_file, open_hub_dataset
from cache.config import DataConfig, SplitConfig
from cache.errors import ConfigError, DataError
from cache.image_root import ImageRoot
from cache.many_objects import many_objects
from cache.records import ImageRef, Record, unreadable
from cache.row_fields import as_object, malformed, show
from cache.row_formats import ImageSource, detect_format, parse_row

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SUFFIXES = (".jsonl", ".json", ".parquet")
_UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that was left out.

    Attributes:
        source: file and line (or row); for malformed JSON the column too.
        reason: what is wrong, with the value.
    """

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class SplitRecords:
    """The records of a split.

    Attributes:
        records: those that can be used, in the order of the file.
        rejected: those that cannot, with `on_bad_record: report`.
        path: where the split lies, as the configuration says it.
        total: how many rows there are, blank lines not counted.
        root: what the image names are relative to: a folder without symlinks, or the id of a hub dataset.
    """

    records: tuple[Record, ...]
    rejected: tuple[Rejection, ...]
    path: str
    total: int
    root: str


@dataclass(frozen=True)
class _RawRow:
    """A decoded row, or why it could not be decoded. `number` is its line, or its index where there are no lines."""

    value: object
    source: str
    default_id: str
    number: int


@dataclass(frozen=True)
class _Rows:
    """Where the rows of a split come from. `arrow` is None for text files, `root` for hub datasets without one."""

    name: str
    rows: Iterator[_RawRow]
    root: ImageRoot | None
    arrow: ArrowRows | None = None


@many_objects()
def read_split(data: DataConfig, split: str) -> SplitRecords:
    """Reads the records of one split. Image files are named, not opened, and need not exist.

    Args:
        data: the dataset's settings.
        split: one of `data.splits`.

    Raises:
        ConfigError: there is no such split.
        DataError: the file is missing or unreadable, no record is usable, a record cannot be used
            (`on_bad_record: fail`), or more than `max_bad_share` of them cannot (`on_bad_record: report`).
        ReadError: the file is there, and the file system does not give it.
    """
    path = section_of(data, split).path
    rows = _open(data, split)
    records: list[Record] = []
    rejected: list[Rejection] = []
    data_format = None if data.format == "auto" else data.format
    for row in _readable(rows.rows, path):
        try:
            if isinstance(row.value, DataError):
                raise row.value
            data_format = data_format or detect_format(as_object(row.value, "the row", row.source), row.source)
            parts = parse_row(row.value, data_format, row.source, data.stage_format)
            images = tuple(_image_ref(source, index, row, rows) for index, source in enumerate(parts.images))
        except DataError as error:
            if data.on_bad_record == "fail":
                raise
            rejected.append(Rejection(error.where or row.source, error.what))
        else:
            records.append(Record(parts.record_id or row.default_id, row.source, parts.turns, images))
    root = str(rows.root.root) if rows.root is not None else path
    result = SplitRecords(tuple(records), tuple(rejected), path, len(records) + len(rejected), root)
    require_few(rejected, result.total, data, path)
    return result


def require_few(rejected: Sequence[Rejection], total: int, data: DataConfig, path: str) -> None:
    """Refuse to go on when no record can be used, or more than `data.max_bad_share` of them cannot.

    Args:
        total: rows of the split, the rejected ones included.
        path: where the split lies.

    Raises:
        DataError: says how many and gives the first reasons.
    """
    count, limit = len(rejected), data.max_bad_share
    first = "".join(f"\n  {rejection.source}: {rejection.reason}" for rejection in rejected[:3])
    if total and count / total > limit:
        raise DataError(
            f"{count} of {total} records cannot be used: {count / total:.2%}, more than the "
            f"{limit:.2%} of data.max_bad_share. The first:{first}",
            where=path,
            do="correct them, or raise data.max_bad_share",
        )
    if count == total:
        raise DataError(f"the dataset has no usable record{first}", where=path, do="check the file")


def section_of(data: DataConfig, split: str) -> SplitConfig:
    """The settings of a split.

    Raises:
        ConfigError: there is no such split.
    """
    if split not in data.splits:
        raise ConfigError(f"unknown split {split!r}", where="data.splits", do=f"use one of: {', '.join(data.splits)}")
    return data.splits[split]


def _open(data: DataConfig, split: str) -> _Rows:
    section = data.splits[split]
    path = Path(section.path).expanduser()
    wanted = section.hub_split or split
    root = section.image_root or data.image_root
    if not path.exists():
        arrow, name = _open_hub(section, wanted), section.path
    elif path.is_dir() or path.suffix.lower() == ".parquet":
        arrow, name = open_folder_or_file(path, wanted), path.name
        root = root or (path if path.is_dir() else path.parent)
    else:
        return _Rows(path.name, _open_text(path), ImageRoot(root or path.parent))
    rows = (
        _RawRow(value, f"{section.path}[{index}]", f"{name}[{index}]", index)
        for index, value in enumerate(arrow.rows())
    )
    return _Rows(name, rows, ImageRoot(root) if root else None, arrow)


def require_hub_id(section: SplitConfig) -> None:
    """Check that what is no file or folder here may be a dataset of the hub.

    Raises:
        DataError: it is a path.
    """
    if not _HUB_ID.fullmatch(section.path) or section.path.lower().endswith(_SUFFIXES):
        raise DataError(
            f"there is no such file or folder (looked for {Path(section.path).expanduser().absolute()})",
            where=section.path,
            do="correct data.splits; paths are relative to the working directory, hub ids are written org/name",
        )


def _open_hub(section: SplitConfig, wanted: str) -> ArrowRows:
    require_hub_id(section)
    return open_hub_dataset(section.path, wanted)


def _open_text(path: Path) -> Iterator[_RawRow]:
    if path.suffix.lower() == ".jsonl":
        return _jsonl_rows(path)
    if path.suffix.lower() == ".json":
        return _json_rows(path)
    raise DataError(
        f"files of the kind {path.suffix or 'without a suffix'!r} are not read",
        where=str(path),
        do=f"give a file that ends in {', '.join(_SUFFIXES)}",
    )


def _jsonl_rows(path: Path) -> Iterator[_RawRow]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(_UTF8_BOM) if number == 1 else line
            if content.strip():
                value = _decode(content.rstrip(b"\r\n"), f"{path}:{number}", is_line=True)
                yield _RawRow(value, f"{path}:{number}", f"{path.name}:{number}", number)


def _json_rows(path: Path) -> Iterator[_RawRow]:
    with _opened(path) as file:
        value = _decode(file.read().removeprefix(_UTF8_BOM), str(path), is_line=False)
    if isinstance(value, DataError):
        raise value
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise malformed("the file", 'a list of rows or {"data": [...]}', value, str(path))
    for index, row in enumerate(rows):
        yield _RawRow(row, f"{path}[{index}]", f"{path.name}[{index}]", index)


def _readable(rows: Iterator[_RawRow], path: str) -> Iterator[_RawRow]:
    try:
        yield from rows
    except OSError as error:
        raise unreadable(path, error) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), do="check its permissions"
        ) from error


def _decode(content: bytes, where: str, *, is_line: bool) -> object:
    """The decoded JSON; a DataError is returned, not raised, so that a generator of rows goes on behind a bad line."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        place = f"{where}:{error.start + 1}" if is_line else where
        return DataError(f"byte {error.start + 1} is not UTF-8: {error.reason}", where=place, do="save it as UTF-8")
    except json.JSONDecodeError as error:
        place = f"{where}:{error.colno}" if is_line else f"{where}:{error.lineno}:{error.colno}"
        other = (
            "a file that is one JSON list is named .json" if is_line else "a file with one row a line is named .jsonl"
        )
        return DataError(f"malformed JSON: {error.msg}", where=place, do=f"correct it; {other}")
    except (ValueError, RecursionError) as error:
        return DataError(f"JSON that cannot be decoded: {error}", where=where, do="correct it")


def _image_ref(source: ImageSource, index: int, row: _RawRow, rows: _Rows) -> ImageRef:
    if source.path is None:
        if rows.arrow is None:
            raise ValueError("a text file cannot hold bytes")
        data = rows.arrow.embedded(row.number, source.location)
        return ImageRef(path=f"{rows.name}#{row.number}/{index}", data=data)
    if rows.root is None:
        raise DataError(
            f"image {show(source.path)} is a path, and a hub dataset has no folder that it could be relative to",
            where=row.source,
            do="set data.image_root to the folder of the images",
        )
    return rows.root.resolve(source.path, row.source)
