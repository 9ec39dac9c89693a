"""Image paths of a dataset -> files inside the image root. Nothing outside of it is ever opened."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePosixPath

from cache.errors import DataError
from cache.records import NO_SUCH_NAME, ImageRef, unreadable
from cache.row_fields import show

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://|data:", re.IGNORECASE)
_NORMAL = re.compile(r"(?!\.{1,2}(?:/|\Z))[^/]+(?:/(?!\.{1,2}(?:/|\Z))[^/]+)*")  # a relative path without `.` and `..`


def _is_link(file: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(file).st_mode)
    except OSError as error:
        # What cannot be read at all is said when it is read; but a link that is not seen now could be followed then.
        if error.errno in NO_SUCH_NAME or error.errno in (errno.ENOENT, errno.EACCES):
            return False
        raise unreadable(file, error) from error


class ImageRoot:
    """Resolves image paths against one folder.

    Each distinct path is resolved once, and so is each folder: on network file systems a lookup costs a round trip, and
    a path has as many as it has folders. Files need not exist: training from a cache reads none. Paths are text as far
    as can be: of a hundred thousand, building and comparing Path objects took as long as reading the files' headers.
    """

    def __init__(self, root: Path) -> None:
        """Takes the folder that image paths are relative to and must not leave."""
        self.root = Path(os.path.realpath(root))
        self._given = os.path.abspath(root)  # noqa: PTH100 - Path.resolve would follow symlinks
        self._inside = os.path.join(self.root, "")  # noqa: PTH118 - ends with a slash
        self._folders: dict[str, str] = {}
        self._refs: dict[str, ImageRef] = {}

    def resolve(self, name: str, where: str) -> ImageRef:
        """The file that a row names.

        Args:
            name: the path as it stands in the row.
            where: file and line, for messages.

        Returns:
            A reference whose `path` is `name`, normalised and relative to the root.

        Raises:
            DataError: a URL, a path that cannot be one, or a path that leaves the root by `..`, as an absolute path
                or through a symlink.
        """
        if name not in self._refs:
            self._refs[name] = self._resolve(name, where)
        return self._refs[name]

    def _resolve(self, name: str, where: str) -> ImageRef:
        if _URL.match(name):
            raise DataError(
                f"image {show(name)} is a URL", where=where, do="download the images and name their files in the rows"
            )
        if "\0" in name:
            raise DataError(f"image {show(name)} has a null character", where=where, do="correct the row")
        # Joined as text: Path would drop a trailing slash or dot, which tell a folder from a file.
        folder, base = os.path.split(os.path.join(self._given, name))  # noqa: PTH118
        if base in ("", ".", ".."):
            raise DataError(f"image {show(name)} names a folder", where=where, do="name an image file")
        file = self._real_file(folder, base)
        if not file.startswith(self._inside) or file == self._inside:
            raise DataError(
                f"image {show(name, 500)} leaves the image root {self.root}: it leads to {file}",
                where=where,
                do="move the image into the root, or set data.image_root to a folder that holds all images",
            )
        place = Path(file)
        return ImageRef(path=name if _NORMAL.fullmatch(name) else self._relative(name, place), file=place)

    def _real_file(self, folder: str, base: str) -> str:
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        file = os.path.join(self._folders[folder], base)  # noqa: PTH118
        return os.path.realpath(file) if _is_link(file) else file

    def _relative(self, name: str, file: Path) -> str:
        # Without the file system, `a/../b` may be another file than `b` (a may be a symlink), and two images must
        # not share a name: such paths, and absolute ones, take the name of the file that they lead to.
        path = PurePosixPath(name)
        return str(file.relative_to(self.root) if path.is_absolute() or ".." in path.parts else path)
