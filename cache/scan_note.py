"""What a scan of a split's images has hashed so far, so that one that was cut short goes on where it was."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cache.atomic import write_text
from cache.documents import load
from cache.errors import CacheError
from cache.seal import seal
from cache.split_images import SplitImage, SplitImages
from cache.split_lists import same_root

SCANS = "scans"


class ScanNote:
    """A file of the fingerprint's folder; nothing depends on it, and it goes once the split's list is written.

    Several parts may write it at once: the last one's stands, and what is not in it is hashed again.
    """

    def __init__(self, folder: Path, split: str, root: str) -> None:
        self._split, self._root = split, root
        self._file = folder / SCANS / f"{split}.json"

    def load(self) -> list[SplitImage]:
        """The images that were hashed under this root; none where the note is missing, damaged or another root's."""
        try:
            note = load(self._file, SplitImages)
        except CacheError:
            return []
        return note.images if note.root is not None and same_root(note.root, self._root) else []

    def save(self, images: list[SplitImage]) -> None:
        """Note these.

        Raises:
            OSError, ResourceError: they cannot be written.
        """
        note = SplitImages(split=self._split, source="", num_records=0, root=self._root, images=images, refused={})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, seal(note.model_dump_json()))

    def remove(self) -> None:
        """Forget it, if it can be removed: on a read-only file system even one that is missing cannot."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)
        with suppress(OSError):  # another split's note lies there, or a part is about to write its own
            self._file.parent.rmdir()
