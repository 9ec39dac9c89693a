"""One row of a dataset, whatever format it came in. This is the vocabulary of the whole house."""

from __future__ import annotations

import errno
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cache.errors import DataError, ReadError

MAX_IMAGE_BYTES = 1 << 30  # encoded; no image below cache.max_image_pixels comes near it

# The row is wrong, whenever it is tried.
NO_SUCH_NAME = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EILSEQ, errno.EINVAL})

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class TableState:
    """Tells whether the files of a table are those that they were.

    Attributes:
        digest: of name, size and modification time of each file, in order; 0 where there is none to ask.
        changed_ns: when the newest of them was changed; 0 as above.
    """

    digest: int = 0
    changed_ns: int = 0


@dataclass(frozen=True, slots=True)
class Embedded:
    """Encoded bytes that stand in a row of a memory-mapped Arrow table. Holds where they are, not the bytes.

    Attributes:
        dataset: a `datasets.Dataset` of the one column that holds the image, in the format "arrow". It lies in a file,
            so that a pickle of this object is small.
        row: index into `dataset`.
        location: keys and indices that lead from the row's value to the bytes (or to their `{bytes, path}` struct).
        state: of the files that the table comes from.
    """

    dataset: Any = field(repr=False, compare=False)
    row: int
    location: tuple[str | int, ...] = ()
    state: TableState = field(default=TableState(), compare=False)

    def read(self) -> bytes:
        """Copies the encoded bytes of this one image out of the table; the other images of the row stay on disk."""
        content = self._bytes().as_py()
        if isinstance(content, list) and None in content:
            raise DataError("a number of the image's bytes is null", do="correct the row, or leave it out")
        return bytes(content or b"")

    @property
    def num_bytes(self) -> int:
        """How many bytes there are. Copies none."""
        value = self._bytes()
        if not value.is_valid:
            return 0
        return len(value.as_buffer()) if hasattr(value, "as_buffer") else len(value)

    def _bytes(self) -> Any:
        value = self.dataset[self.row : self.row + 1].column(0)[0]
        for step in self.location:
            value = value[step]
        return value["bytes"] if value.is_valid and isinstance(value, Mapping) else value


@dataclass(frozen=True, slots=True)
class Stamp:
    """Tells cheaply that bytes may have changed.

    Attributes:
        size: number of bytes.
        mtime_ns: when the file was changed last; of bytes in a table a number that stands for all its files
            (TableState.digest). 0: not known.
        changed_ns: when the file, or the newest one of the table, was changed last; 0: not known.
    """

    size: int
    mtime_ns: int
    changed_ns: int


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

    def stamp(self) -> Stamp | None:
        """Size and modification time; None when there is no file to ask, and `read` will say why."""
        try:
            if self.data is not None:
                return Stamp(self.data.num_bytes, self.data.state.digest, self.data.state.changed_ns)
            status = self.file.stat() if self.file is not None else None
        except (OSError, UnicodeEncodeError):
            return None
        return Stamp(status.st_size, status.st_mtime_ns, status.st_mtime_ns) if status else None

    def read(self) -> bytes:
        """The image's encoded bytes.

        Raises:
            DataError: the file is missing, is no regular file, has more than MAX_IMAGE_BYTES, its name is one that no
                file can have, or there are no bytes.
            ReadError: the file is there, and the file system does not give it: that may pass.
        """
        if self.data is not None:
            try:
                content = self.data.read()
            except OSError as error:
                raise unreadable(self.path, error) from error
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
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError("the image is not a regular file", where=str(file), do="name an image file in the row")
        require_size(status.st_size, str(file))
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            "the image file does not exist", where=str(file), do="check the row's path and data.image_root"
        ) from error
    except UnicodeEncodeError as error:
        raise no_such_name(file, f"{error.reason} at character {error.start}") from error
    except OSError as error:
        if error.errno in NO_SUCH_NAME:
            raise no_such_name(file, str(error.strerror)) from error
        raise unreadable(str(file), error) from error


def no_such_name(file: Path, reason: str) -> DataError:
    """The error for a name under which there can be no image file."""
    return DataError(f"no image file can have this name: {reason}", where=str(file), do="correct the row")


def require_size(num_bytes: int, where: str) -> None:
    """Refuse what is too large for an image, before it takes memory.

    Raises:
        DataError: it has more than MAX_IMAGE_BYTES.
    """
    if num_bytes > MAX_IMAGE_BYTES:
        raise DataError(
            f"the file has {num_bytes / 1e9:.1f} GB, more than any image may have ({MAX_IMAGE_BYTES / 1e9:.1f} GB)",
            where=where,
            do="name an image file in the row",
        )


def unreadable(where: str, error: OSError) -> ReadError:
    """The error for a file that is there and cannot be read, as opposed to one whose content cannot be used."""
    return ReadError(
        f"the file cannot be read: {error.strerror or error}",
        where=where,
        do="check the file system and the file's permissions, then run the same command again: it goes on where it was",
    )


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
