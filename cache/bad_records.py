"""Records that name an image that cannot be used: the first one ends the run, or they are counted and listed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cache.atomic import write_text
from cache.config import DataConfig
from cache.dataset import Rejection
from cache.errors import DataError
from cache.records import Record

_LEAVE = "leave such records out with data.on_bad_record: report"
LEAVE_OUT = f"mend it, or {_LEAVE}"


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
                    raise DataError(f"image {path}: {error.what}", where=record.source, do=_advice(error.do))
                rejected.append(Rejection(record.source, f"image {path}: {error.what}"))
                break
    return rejected


def _advice(do: str | None) -> str:
    if do is None:
        return LEAVE_OUT
    return do if "on_bad_record" in do else f"{do}, or {_LEAVE}"


def list_rejected(folder: Path, split: str, rejected: Sequence[Rejection]) -> Path | None:
    """Write what was left out to `<folder>/<split>.rejected.jsonl`; an older list is replaced, also by none.

    Returns:
        The list; None when nothing was left out.
    """
    target = folder / f"{split}.rejected.jsonl"
    if not rejected:
        target.unlink(missing_ok=True)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_text(target, "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in rejected))
    return target
