"""Range requests over HTTP and HTTPS with the standard library; one connection a process and thread, kept open."""

from __future__ import annotations

import os
import re
import ssl
import threading
import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from cache.errors import CacheError, ConfigError
from cache.transport import Patience, Transport, missing

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)
_PASSING = {408, 425, 429}  # and all from 500 on
_PIECE = 1 << 20  # bytes between two looks at the clock


class HttpTransport(Transport):
    """See the module's docstring. Redirects are not followed: a server could lead elsewhere with them.

    Raises:
        ConfigError: the address names no host, or holds a password.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        super().__init__(url, patience)
        parts = urlsplit(url)
        if not parts.hostname or parts.username is not None or parts.fragment:
            raise ConfigError(
                f"cache.dir {parts.scheme}://{parts.hostname or ''}{parts.path} is no address that can be used: it "
                "must have a host, and neither user, password nor #fragment",
                do="write it as http://host:port/path/<fingerprint>; serve a protected cache from a port that needs no "
                "password, or mount it",
            )
        self._parts = parts
        self._threads = _Threads()

    @property
    def _kept(self) -> _Connection:
        return self._threads.connection

    def place(self, path: str) -> str:
        """See Transport. A query may be a signature: it is left out."""
        return f"{self._parts.scheme}://{self._parts.netloc}{self._parts.path.rstrip('/')}/{path}"

    def _read_some(self, path: str, target: memoryview, offset: int, size: int) -> int:
        end = offset + len(target)
        response = self._ask(path, {"Range": f"bytes={offset}-{end - 1}"})
        try:
            count = self._checked_range(response, path, offset, len(target), size)
            return self._receive(response, target[:count])
        finally:
            self._finish(response)

    def _checked_range(self, response: HTTPResponse, path: str, offset: int, wanted: int, size: int) -> int:
        """How many bytes the answer brings."""
        if response.status == 200:
            if offset == 0 and wanted == size and response.length in {None, size}:
                return wanted
            raise CacheError(
                "the server does not answer range requests: it sends the whole file instead of a part of it",
                where=self.place(path),
                do="serve the cache with a server that does, such as nginx, Apache, Caddy or an object store "
                "(`python -m http.server` does not), or copy it to a local folder",
            )
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status == 416 or (found and found[3] not in {"*", str(size)}):
            raise CacheError(
                f"does not have the {size} bytes that the index states",
                where=self.place(path),
                do="publish the shard anew, as a whole; `pipeline verify` tells whether the original is intact",
            )
        if response.status != 206 or not found or int(found[1]) != offset:
            raise CacheError(
                f"the server answers a range request with status {response.status} and the range "
                f"{response.headers.get('Content-Range')!r}",
                where=self.place(path),
                do="serve the cache with another server",
            )
        count = int(found[2]) - offset + 1
        if not 0 < count <= wanted or response.length not in {None, count}:
            raise ConnectionError("the answer's length does not fit its range")
        return count

    def _read_whole(self, path: str, limit: int) -> bytes | None:
        response = self._ask(path, {}, may_miss=True)
        try:
            if response.status == 404:
                return None
            if response.status != 200:
                raise CacheError(
                    f"the server answers with status {response.status}", where=self.place(path), do="check cache.dir"
                )
            if response.length is None:  # sent in chunks
                content = response.read(limit + 1)
                if len(content) > limit:
                    raise self.too_large(path, f"more than {limit}")
                return content
            if response.length > limit:
                raise self.too_large(path, response.length)
            whole = bytearray(response.length)
            count = self._receive(response, memoryview(whole))
            if count < len(whole):
                raise ConnectionError(f"the answer ended after {count} of {len(whole)} bytes")
            return bytes(whole)
        finally:
            self._finish(response)

    def _receive(self, response: HTTPResponse, target: memoryview) -> int:
        """Bytes until `target` is full or the connection ends, whichever comes first."""
        deadline, done = self.patience.deadline(len(target)), 0
        while done < len(target):
            try:
                count = response.readinto(target[done : done + _PIECE])
            except OSError:
                count = 0  # what has arrived counts; the next attempt tells what is wrong
            done += count
            if count == 0 or time.monotonic() > deadline:
                break
        if done < len(target):
            self._kept.drop()  # the response calls itself closed then, as after its end
        return done

    def _ask(self, path: str, headers: dict[str, str], *, may_miss: bool = False) -> HTTPResponse:
        """Send a request; returns an answer that is of use.

        Raises:
            OSError, HTTPException: it may go better next time.
            CacheError: it will not.
        """
        target = f"{self._parts.path.rstrip('/')}/{quote(path)}" + (
            f"?{self._parts.query}" if self._parts.query else ""
        )
        try:
            response = self._send(target, {"Accept-Encoding": "identity", **headers})
        except ssl.SSLCertVerificationError as error:
            raise CacheError(
                f"the server's certificate cannot be trusted: {error.verify_message}",
                where=self.place(path),
                do="name the server as its certificate does, or set SSL_CERT_FILE to the authority's certificate",
            ) from error
        status = response.status
        if status in {200, 206, 416} or (status == 404 and may_miss):
            return response
        self._kept.drop()
        if status in _PASSING or status >= 500:
            raise ConnectionError(f"the server answers with status {status} {response.reason}")
        if status == 404:
            raise missing(self.place(path))
        if 300 <= status < 400:
            raise CacheError(
                f"the server redirects (status {status}), which is not followed",
                where=self.place(path),
                do="set cache.dir to the address where the files really are",
            )
        raise CacheError(
            f"the server answers with status {status} {response.reason}",
            where=self.place(path),
            do="check cache.dir and who may read there",
        )

    def _send(self, target: str, headers: dict[str, str]) -> HTTPResponse:
        """Send a request, over the kept connection where there is one.

        Raises:
            OSError, HTTPException: there is no answer.
        """
        connection = self._kept.get(self._parts.scheme, self._parts.netloc, self.patience.timeout)
        reused = connection.sock is not None
        try:
            connection.request("GET", target, headers=headers)
            return connection.getresponse()
        except (ConnectionError, ssl.SSLEOFError):
            self._kept.drop()
            if not reused:
                raise
        except BaseException:
            self._kept.drop()
            raise
        # Servers close connections that nobody has used for a while: that says nothing about a new one.
        return self._send(target, headers)

    def _finish(self, response: HTTPResponse) -> None:
        """Keep the connection for the next request only if this answer was read to its end."""
        if not response.isclosed():
            self._kept.drop()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_threads": _Threads()}


class _Connection:
    """A connection that is kept open until it is let go; one that was inherited by a fork is left to the parent."""

    def __init__(self) -> None:
        self._connection: HTTPConnection | None = None
        self._process = 0

    def get(self, scheme: str, host: str, timeout: float) -> HTTPConnection:
        """The open connection, or a new one that opens with its first request."""
        if self._connection is not None and self._process != os.getpid():
            self.drop()  # closes this process's descriptor only
        if self._connection is None:
            if scheme == "https":
                self._connection = HTTPSConnection(host, timeout=timeout, context=ssl.create_default_context())
            else:
                self._connection = HTTPConnection(host, timeout=timeout)
            self._process = os.getpid()
        return self._connection

    def drop(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        self.drop()


class _Threads(threading.local):
    """Each thread's connection, closed when the thread ends."""

    def __init__(self) -> None:
        self.connection = _Connection()
