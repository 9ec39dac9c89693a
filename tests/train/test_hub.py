"""Uploading against a server that refuses as the Hub does: one error of ours each, and the folder stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.hf_api import api

from cache.errors import ConfigError
from train.hub import push, require_repository_name


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """Sets what the Hub answers to everything; None: nothing listens there."""
    servers: list[ThreadingHTTPServer] = []

    def answer(status: int | None) -> None:
        class Refusing(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status or 500)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
        if status is None:
            server.server_close()
        else:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            servers.append(server)
        monkeypatch.setattr(api, "endpoint", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    yield answer
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "what", "advice"),
    [
        (401, "the Hub answered 401", "hf auth login"),
        (403, "the Hub answered 403", "a token that may write there"),
        (404, "the Hub answered 404", "check the name's first part"),
        (500, "the Hub answered 500", "try again later"),
        (None, "the Hub cannot be used", "check the network"),
    ],
)
def test_a_refusal_says_what_is_left_and_how_to_go_on(
    hub: Callable[[int | None], None], tmp_path: Path, status: int | None, what: str, advice: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub(status)

    with pytest.raises(ConfigError) as refused:
        push(tmp_path, "me/mine")

    assert what in refused.value.what
    assert "saved here, but was not uploaded to me/mine" in refused.value.what
    assert advice in str(refused.value.do)
    assert f"`hf upload me/mine {tmp_path}`" in str(refused.value.do)
    assert refused.value.where == str(tmp_path)
    assert (tmp_path / "config.json").is_file()


def test_offline_mode_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the Hub cannot be used"):
        push(tmp_path, "me/mine")


def test_a_name_that_no_repository_can_have() -> None:
    require_repository_name("me/mine")
    with pytest.raises(ConfigError, match="--push-to-hub a/b/c"):
        require_repository_name("a/b/c")
