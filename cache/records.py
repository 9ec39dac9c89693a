"""One row of a dataset, whatever format it came in. This is the vocabulary of the whole house."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache.errors import DataError

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Encoded bytes that stand in a row of a memory-mapped Arrow table. Holds where they are, not the bytes.

    Attributes:
        dataset: a `datasets.Dataset` of the one column that holds the image, in the format "arrow". It lies in a file,
            so that a pickle of this object is small.
        row: index into `dataset`.
        location: keys and indices that lead from the row's value to the bytes (or to their `{bytes, path}` struct).
    """

    dataset: Any = field(repr=False, compare=False)
    row: int
    location: tuple[str | int, ...] = ()

    def read(self) -> bytes:
        """Copies the encoded bytes of this one image out of the table; the other images of the row stay on disk."""
        value = self.dataset[self.row : self.row + 1].column(0)[0]
        for step in self.location:
            value = value[step]
        content = value.as_py()
        return bytes((content["bytes"] if isinstance(content, dict) else content) or b"")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Where an image's encoded bytes are: a file inside the image root, or the row itself (Parquet).

    Attributes:
        path: as the dataset names it, for messages and for looking features up. Unique within a split.
        file: the resolved file, inside the image root; None when the bytes are in the row.
        data: the handle of the encoded bytes when they are in the row.
    """

    path: str
    file: Path | None = None
    data: Embedded | None = None

    def read(self) -> bytes:
        """The image's encoded bytes.

        Raises:
            DataError: the file is missing, is no regular file, cannot be read, or there are no bytes.
        """
        if self.data is not None:
            content = self.data.read()
        elif self.file is not None:
            content = _read_file(self.file)
        else:
            raise ValueError(f"ImageRef {self.path!r} has neither a file nor data")
        if not content:
            raise DataError(
                "the image is empty (0 bytes)", where=str(self.file or self.path), do="replace it or leave it out"
            )
        return content


def _read_file(file: Path) -> bytes:
    try:
        # A named pipe would block for ever, so the kind of file is looked at before it is opened.
        if file.exists() and not file.is_file():
            raise DataError("the image is not a regular file", where=str(file), do="name an image file in the row")
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            "the image file does not exist", where=str(file), do="check the row's path and data.image_root"
        ) from error
    except OSError as error:
        raise DataError(
            f"the image file cannot be read: {error.strerror or error}", where=str(file), do="check its permissions"
        ) from error


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text in a turn.

    Attributes:
        text: exactly as it stands in the dataset.
        weight: factor on the loss of its tokens. Used in assistant turns only.
        stage: the name of the stage that it answers, for staged chains of thought.
    """

    text: str
    weight: float = 1.0
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """The place of an image in a turn; `index` counts into the record's `images`."""

    index: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the conversation."""

    role: Role
    content: tuple[Text | Image, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One sample: a conversation over images. Only assistant turns are targets.

    Attributes:
        record_id: the dataset's own id, or `<file name>:<line>` (`<file name>[<row>]` where a file has no lines).
        source: file and line (or row), for messages.
        turns: in order; image parts refer to `images`.
        images: in the order of their places; the same image may stand twice.
    """

    record_id: str
    source: str
    turns: tuple[Turn, ...]
    images: tuple[ImageRef, ...]
