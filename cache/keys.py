"""The name of an image's entry."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import StringConstraints

Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def image_key(data: bytes) -> str:
    """SHA-256 of an image's encoded bytes, in hex. Same bytes, same entry, whatever the files are called."""
    return hashlib.sha256(data).hexdigest()
