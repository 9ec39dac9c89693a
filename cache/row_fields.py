"""Typed access to the fields of a row, with messages that name the field, its value, its place and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cache.errors import DataError

Row = Mapping[str, Any]


def require(mapping: Row, name: str, owner: str, where: str) -> object:
    """`mapping[name]`.

    Args:
        mapping: the row, or an object in it.
        name: the field.
        owner: what `mapping` is, for messages.
        where: file and line, for messages.

    Raises:
        DataError: the field is missing or null. The message lists the fields that are there.
    """
    if name not in mapping:
        raise DataError(
            f"{owner} has no field {name!r}; it has: {key_list(mapping)}",
            where=where,
            do=f"add {name!r}, or name the format of the rows in data.format",
        )
    if mapping[name] is None:
        raise DataError(f"{owner}: field {name!r} is null", where=where, do="give it a value, or leave the row out")
    return mapping[name]


def as_text(value: object, what: str, where: str) -> str:
    """`value`, which must be a string that UTF-8 can hold.

    Raises:
        DataError: it is something else, or has half a surrogate pair in it (`"\\ud83d"` in JSON).
    """
    if not isinstance(value, str):
        raise malformed(what, "a string", value, where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half a surrogate pair at character {error.start}: {show(value)}",
            where=where,
            do="write the character whole",
        ) from error
    return value


def as_answer(value: object, what: str, where: str) -> str:
    """A text to learn; numbers and booleans are written as Python writes them.

    Raises:
        DataError: it is empty or only white space, not finite, or of another type.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{what} is {value}", where=where, do="give an answer, or leave the row out")
    text = str(value) if isinstance(value, bool | int | float) else as_text(value, what, where)
    if not text.strip():
        raise DataError(f"{what} is empty ({show(text)})", where=where, do="give an answer, or leave the row out")
    return text


def as_weight(value: object, what: str, where: str) -> float:
    """A factor on the loss; 1 where it is null.

    Raises:
        DataError: it is not a number, not finite or negative.
    """
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise malformed(what, "a number", value, where)
    try:
        weight = float(value)
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight < 0:
        raise DataError(f"{what} is {show(value)}", where=where, do="give a finite number, 0 or larger")
    return weight


def as_object(value: object, what: str, where: str) -> Row:
    """`value`, which must be an object with named fields.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise malformed(what, "an object with named fields", value, where)
    return value


def as_list(value: object, what: str, where: str) -> list[Any]:
    """`value`, which must be a list.

    Raises:
        DataError: it is something else.
    """
    if not isinstance(value, list):
        raise malformed(what, "a list", value, where)
    return value


def malformed(what: str, wanted: str, value: object, where: str) -> DataError:
    """The error for a value of the wrong type."""
    kind = "null" if value is None else f"{type(value).__name__} {show(value)}"
    return DataError(f"{what} is {kind}, not {wanted}", where=where, do="correct the row, or leave it out")


def show(value: object, limit: int = 60) -> str:
    """`repr(value)`, cut to the length of a message."""
    # The cut of a string comes first: repr of a whole document would be made only to be thrown away.
    text = repr(value[: limit + 1] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[:limit] + "..."


def key_list(mapping: Row) -> str:
    """The keys of a row, for messages."""
    return ", ".join(map(str, mapping)) or "none"
