"""Reads ranges of remote files with patience: failures that may pass are tried again, all others end at once."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, TypeVar

from cache.errors import CacheError, ConfigError

_T = TypeVar("_T")
# Draws for the jitter must not disturb the generators that training has seeded.
_random = secrets.SystemRandom()


@dataclass(frozen=True, slots=True)
class Patience:
    """How failures are met; all times in seconds.

    Attributes:
        attempts: of each read, the first one included.
        first_delay, longest_delay: between attempts; doubled each time, and a random part of up to a half taken off, so
            that the workers of many nodes do not all come back at the same instant.
        timeout: of connecting, and of each wait for more bytes.
        slowest: bytes a second below which an answer counts as failed, so that a stalling server holds nobody for long.
    """

    attempts: int = 8
    first_delay: float = 0.25
    longest_delay: float = 15.0
    timeout: float = 30.0
    slowest: float = 1e6

    def delay(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        longest = min(self.longest_delay, self.first_delay * 2 ** (failures - 1))
        return longest * _random.uniform(0.5, 1.0)

    def deadline(self, size: int) -> float:
        """The instant (time.monotonic) at which an answer of so many bytes that starts now must have ended."""
        return time.monotonic() + self.timeout + size / self.slowest


class Transport(ABC):
    """Reads the files below an address. Picklable; what it opens belongs to the process that opened it.

    Args:
        url: of the folder.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        self.url, self.patience = url, patience

    @abstractmethod
    def place(self, path: str) -> str:
        """A file's address for messages, without anything secret."""

    @abstractmethod
    def _read_some(self, path: str, target: memoryview, offset: int, size: int) -> int:
        """One attempt to fill `target` from `offset` on; returns how many bytes arrived, perhaps fewer.

        Args:
            size: what the whole file must have.

        Raises:
            OSError, HTTPException: it may go better next time.
            CacheError: it will not.
        """

    @abstractmethod
    def _read_whole(self, path: str, limit: int) -> bytes | None:
        """One attempt to read a file of at most `limit` bytes; None if there is none. Raises as `_read_some` does."""

    def read_into(self, path: str, target: memoryview, offset: int, size: int) -> None:
        """Fill `target` with a file's bytes from `offset` on. What has arrived is not fetched again.

        Raises:
            CacheError: it cannot be, or the file does not have `size` bytes.
        """
        done = 0

        def attempt() -> None:
            nonlocal done
            wanted = len(target) - done
            count = self._read_some(path, target[done:], offset + done, size)
            done += count
            if count < wanted:
                raise ConnectionError(f"the answer ended after {count} of {wanted} bytes")

        self._patiently(path, attempt)

    def read_whole(self, path: str, limit: int) -> bytes | None:
        """A file of at most `limit` bytes; None if there is none.

        Raises:
            CacheError: it cannot be read, or it is larger.
        """
        return self._patiently(path, lambda: self._read_whole(path, limit))

    def too_large(self, path: str, size: int | str) -> CacheError:
        """The error for a small file that is not small."""
        return CacheError(
            f"has {size} bytes, more than any file of this kind",
            where=self.place(path),
            do="check that cache.dir is the address of a cache",
        )

    def _patiently(self, path: str, attempt: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return attempt()
            except (OSError, HTTPException) as error:
                failures += 1
                if failures == self.patience.attempts:
                    raise CacheError(
                        f"cannot be read after {failures} attempts: {error or type(error).__name__}",
                        where=self.place(path),
                        do="check that the server is up and reachable from this machine, and the credentials if it "
                        "asks for any, then run the same command again: it goes on where it was",
                    ) from error
            time.sleep(self.patience.delay(failures))


class FsspecTransport(Transport):
    """Everything that fsspec has a file system for (s3://, gs://, abfs://, ...), where that is installed."""

    def __init__(self, url: str, patience: Patience) -> None:
        super().__init__(url.rstrip("/"), patience)
        self._opened: tuple[int, Any, str] | None = None

    def place(self, path: str) -> str:
        """See Transport."""
        return f"{self.url.partition('?')[0]}/{path}"

    def _read_some(self, path: str, target: memoryview, offset: int, size: int) -> int:
        del size  # what is cut or longer does not pass the checksum
        system, root = self._system()
        try:
            with self._errors_of_the_back_end(path):
                content = system.cat_file(f"{root}/{path}", start=offset, end=offset + len(target))
        except FileNotFoundError:
            raise missing(self.place(path)) from None
        target[: len(content)] = content
        return len(content)

    def _read_whole(self, path: str, limit: int) -> bytes | None:
        system, root = self._system()
        try:
            with self._errors_of_the_back_end(path):
                size = int(system.info(f"{root}/{path}")["size"])
                if size > limit:
                    raise self.too_large(path, size)
                return bytes(system.cat_file(f"{root}/{path}"))
        except FileNotFoundError:
            return None

    @contextmanager
    def _errors_of_the_back_end(self, path: str) -> Iterator[None]:
        """Back ends raise errors of their libraries, of which nobody here knows which may pass: all are tried again."""
        try:
            yield
        except PermissionError as error:
            raise CacheError(
                f"the server refuses it: {error}",
                where=self.place(path),
                do="check the credentials that the fsspec package for such addresses finds, and what they may read",
            ) from error
        except (OSError, CacheError):
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _system(self) -> tuple[Any, str]:
        """This process's own file system object: a forked one would share connections and threads with its parent."""
        if self._opened is None or self._opened[0] != os.getpid():
            import fsspec

            try:
                system, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
            except (ImportError, ValueError) as error:
                raise ConfigError(
                    f"cache.dir cannot be read: {error}",
                    where=self.place(""),
                    do="install the fsspec package for this kind of address, or copy the cache to a local folder",
                ) from error
            self._opened = os.getpid(), system, root
        return self._opened[1], self._opened[2]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def missing(where: str) -> CacheError:
    """The error for a file that the manifest or an index promises and that is not there."""
    return CacheError(
        "is not there",
        where=where,
        do="publish the whole folder of the fingerprint (manifest.json, entries.index, shards, splits) as it is",
    )
