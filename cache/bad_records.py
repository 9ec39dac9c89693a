"""Records that name an image that cannot be used: the first one ends the run, or they are counted and listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cache.config import DataConfig
from cache.dataset import Rejection
from cache.errors import DataError
from cache.records import Record

LEAVE_OUT = "mend it, or leave such records out with data.on_bad_record: report"


def reject_images(records: Iterable[Record], refused: Mapping[str, DataError], data: DataConfig) -> list[Rejection]:
    """The records that name a refused image.

    Args:
        refused: image path -> why.

    Raises:
        DataError: there is one, and `data.on_bad_record` is `fail`. Names the record.
    """
    rejected = []
    for record in records:
        for path in {ref.path: None for ref in record.images}:
            if path in refused:
                error = refused[path]
                if data.on_bad_record == "fail":
                    raise DataError(f"image {path}: {error.what}", where=record.source, do=error.do or LEAVE_OUT)
                rejected.append(Rejection(record.source, f"image {path}: {error.what}"))
                break
    return rejected
