"""The JSON files of a cache folder: read with their size and digest checked, refused where anything is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cache.atomic import write_text
from cache.errors import CacheError, DataError
from cache.seal import seal, seal_holds

MAX_JSON_BYTES = 1 << 30


class Document(BaseModel):
    """Immutable; an unknown key is damage."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileDocument(Document):
    """A document that is a file of its own, and ends with a digest (cache.seal)."""

    digest: str = Field(default="", exclude=True, repr=False)


_D = TypeVar("_D", bound=Document)


def load(path: Path, kind: type[_D], *, sealed: bool = True) -> _D:
    """Read and check a file.

    Args:
        sealed: its digest must hold. Files without one, which were edited by hand, are taken.

    Raises:
        CacheError: it is missing, cannot be read, or is damaged.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise damaged_file(path, f"it has {size} bytes, more than any file of this kind")
        raw = path.read_bytes()
        document = kind.model_validate_json(raw)
        # A file that was edited by hand bears no seal any more; `pipeline verify` names it, reading it is allowed.
        if sealed and seal_holds(raw) is False:
            raise damaged_file(path, "its content does not match its digest")
        return document.model_copy(update={"digest": ""}) if isinstance(document, FileDocument) else document
    except FileNotFoundError:
        raise CacheError("is missing", where=str(path), do="run `pipeline cache` for this configuration") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise damaged_file(path, f"{field}: {first['msg']}" if field else first["msg"]) from error
    except OSError as error:
        raise CacheError(
            f"cannot be read: {error.strerror or error}", where=str(path), do="check its permissions"
        ) from error


def save(
    path: Path,
    document: FileDocument,
    *,
    smaller: str = "report this: no file of this kind should come near it",
    indent: int | None = None,
) -> None:
    """Write a file with its digest, so that `load` takes it.

    Args:
        smaller: what to do where it would be too large.

    Raises:
        DataError: it would have more bytes than `load` reads. Nothing is written.
        ResourceError: the disk is full.
    """
    text = seal(document.model_dump_json(indent=indent))
    size = len(text.encode())
    if size > MAX_JSON_BYTES:
        raise DataError(
            f"would have {size} bytes, and no file of this kind is read that has more than {MAX_JSON_BYTES}",
            where=str(path),
            do=smaller,
        )
    write_text(path, text)


def damaged_file(path: Path, what: str) -> CacheError:
    """The error for a manifest, index or list that cannot be used."""
    return CacheError(
        f"is damaged: {what}",
        where=str(path),
        do="run `pipeline cache --repair --split NAME`: it moves this file aside and makes what it said anew",
    )
