"""Whether the rows of a split are still those that they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cache.arrow_rows import ArrowRows, open_folder_or_file
from cache.config import DataConfig
from cache.dataset import require_hub_id, section_of
from cache.errors import DataError


def rows_digest(data: DataConfig, split: str) -> str:
    """A digest of a split's rows: of the bytes of a text file; of Parquet and saved datasets of all but encoded images.

    A hub dataset counts by its name: what stands behind that is the hub's.

    Raises:
        ConfigError: there is no such split.
        DataError: the rows cannot be read.
    """
    section = section_of(data, split)
    path = Path(section.path).expanduser()
    wanted = section.hub_split or split
    if not path.exists():
        require_hub_id(section)
        return f"hub:{section.path}:{wanted}"
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return _digest_of(open_folder_or_file(path, wanted))
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror}", where=str(path), do="check its permissions"
        ) from error


def _digest_of(arrow: ArrowRows) -> str:
    digest = hashlib.sha256()
    for row in arrow.rows():
        # Dates and the like have no JSON of their own.
        digest.update(json.dumps(row, default=repr).encode() + b"\n")
    return digest.hexdigest()
