"""Garbage that tells where it is collected."""

from __future__ import annotations

import os
from pathlib import Path


class Owned:
    """Like memory of a GPU: it tells when another process frees it. It lies in a cycle, so only a collection does."""

    def __init__(self, told: Path) -> None:
        self._told, self._owner, self._self = told, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self._owner:
            self._told.touch()
