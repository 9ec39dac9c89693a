"""A server of a folder that answers range requests, and misbehaves where a test says so."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Site:
    """A server of a folder, and how it misbehaves.

    Attributes:
        faults: what to do with the next requests: "drop" the connection, answer "500", "truncate" the body.
        only_shards: leave requests without a range alone.
        ranges: whether range requests are answered.
        redirect: where every request is sent on to.
        hangs_up: whether a connection is closed, without a word, once it has brought one answer.
        log: (path, Range) of all requests.
    """

    folder: Path
    url: str = ""
    faults: list[str] = field(default_factory=list)
    only_shards: bool = True
    ranges: bool = True
    redirect: str | None = None
    hangs_up: bool = False
    log: list[tuple[str, str | None]] = field(default_factory=list)

    def shard_requests(self) -> list[tuple[str, str | None]]:
        """Those for shards."""
        return [(path, wanted) for path, wanted in self.log if "/shards/" in path]


class Handler(BaseHTTPRequestHandler):
    """Range requests over a folder; nothing is listed."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    site: Site

    def do_GET(self) -> None:
        site, wanted = self.site, self.headers.get("Range")
        site.log.append((self.path, wanted))
        fault = site.faults.pop(0) if site.faults and (wanted or not site.only_shards) else None
        file = site.folder / self.path.partition("?")[0].lstrip("/")
        if fault == "drop":
            self.close_connection = True
            return
        if site.redirect is not None:
            self._answer(302, b"", {"Location": site.redirect})
        elif fault == "500":
            self._answer(500, b"overloaded")
        elif not file.is_file():
            self._answer(404, b"no such file")
        else:
            self._send(file.read_bytes(), wanted if site.ranges else None, cut=fault == "truncate")

    def _send(self, content: bytes, wanted: str | None, *, cut: bool) -> None:
        status, headers = 200, {}
        if wanted is not None:
            first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            if first >= len(content):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            last = min(last, len(content) - 1)
            status, headers = 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            content = content[first : last + 1]
        self._answer(status, content, headers, cut=cut)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = cut or self.site.hangs_up

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are no news."""


def start_server(folder: Path, certificate: Path | None = None) -> tuple[Site, ThreadingHTTPServer]:
    """Serve a folder on the loopback interface, in a thread.

    Args:
        certificate: a PEM file with a certificate and its key; then it is served by HTTPS.
    """
    site = Site(folder)
    server = _Server(("127.0.0.1", 0), type("SiteHandler", (Handler,), {"site": site}))
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    site.url = f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    return site, server
