"""What happens to records that cannot be used: the first one ends the run, or they are counted and listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def require_few(rejected: Sequence[Rejection], total: int, data: DataConfig) -> None:
    """Refuse to go on when more than `data.max_bad_share` of the records cannot be used.

    Raises:
        DataError: says how many and gives the first reasons.
    """
    if rejected and len(rejected) > data.max_bad_share * total:
        examples = "".join(f"\n    {r.source}: {r.reason}" for r in rejected[:3])
        raise DataError(
            f"{len(rejected)} of {total} records cannot be used, more than data.max_bad_share = "
            f"{data.max_bad_share} allows:{examples}",
            do="mend them, or raise data.max_bad_share",
        )
