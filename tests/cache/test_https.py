"""A cache by HTTPS: read where the server's certificate is trusted, and refused at once where it is not."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.errors import CacheError

from ..range_server import Site  # noqa: TID252  (tests are no package that could be imported by name)
from .conftest import assert_same
from .test_remote import FEATURES, KEYS, make_cache, open_at


def certificate_for(name: str, file: Path) -> Path:
    """A certificate that is signed by itself, and its key, in one PEM file."""
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=test", "-addext"]
    command += [f"subjectAltName={name}", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    key, certificate = file.with_suffix(".key"), file.with_suffix(".crt")
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("HTTPS IS NOT TESTED HERE: there is no openssl to make a certificate with")
    file.write_bytes(certificate.read_bytes() + key.read_bytes())
    return file


def test_a_trusted_server_is_read_from(
    tmp_path: Path, serve: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path / "site")
    certificate = certificate_for("IP:127.0.0.1", tmp_path / "server.pem")
    site = serve(tmp_path / "site", certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    cache = open_at(site.url)
    assert site.url.startswith("https://")
    for key, features in zip(KEYS, FEATURES, strict=True):
        site.faults = ["drop"]
        assert_same(cache.read(key), features)
        assert not site.faults
    assert_same(pickle.loads(pickle.dumps(cache)).read(KEYS[2]), FEATURES[2])


@pytest.mark.parametrize("trusted", [False, True])
def test_a_server_that_cannot_be_trusted_is_refused_at_once(
    tmp_path: Path, serve: Callable[..., Site], monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """Unknown, or known by another name."""
    make_cache(tmp_path / "site")
    certificate = certificate_for("DNS:elsewhere.example" if trusted else "IP:127.0.0.1", tmp_path / "server.pem")
    site = serve(tmp_path / "site", certificate)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    with pytest.raises(CacheError, match=r"certificate cannot be trusted: .+") as caught:
        open_at(site.url)
    assert str(caught.value.where) == f"{site.url}/manifest.json"
    assert "SSL_CERT_FILE" in str(caught.value.do)
    assert not site.log
