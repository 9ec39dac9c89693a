"""Writing in one step: nothing but the old content survives a failure."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.atomic import TEMPORARY_MARK, write_atomically, write_text
from cache.errors import ResourceError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_replaces_the_whole_content(first: str, second: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        target = Path(name) / "file.json"
        for text in (first, second):
            write_text(target, text)
            assert target.read_bytes().decode() == text
        assert names(target.parent) == ["file.json"]


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("failure", [RuntimeError("no"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_a_failing_writer_leaves_what_was_there(tmp_path: Path, old: bytes | None, failure: BaseException) -> None:
    target = tmp_path / "file"
    if old is not None:
        target.write_bytes(old)

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        assert path.parent == target.parent, "another file system could not be renamed from"
        raise failure

    with pytest.raises(type(failure)) as caught:
        write_atomically(target, write)
    assert caught.value is failure
    assert names(tmp_path) == ([] if old is None else ["file"])
    assert old is None or target.read_bytes() == old


def test_a_writer_that_writes_nothing_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "file", lambda _path: None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_do(tmp_path: Path, code: int) -> None:
    target = tmp_path / "file"

    def write(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ResourceError, match="free some space") as caught:
        write_atomically(target, write)
    assert caught.value.where == str(target)
    assert names(tmp_path) == []


def test_the_content_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(("sync", os.fstat(fd).st_ino)), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(("name", Path(a).stat().st_ino)), replace(a, b)))
    write_text(tmp_path / "file", "x")
    file, folder = (tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino
    assert order == [("sync", file), ("name", file), ("sync", folder)]


def test_temporary_names_are_marked_and_differ(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        write_atomically(tmp_path / "file", lambda path: (seen.append(path.name), path.write_bytes(b"")))
    assert len(set(seen)) == 3
    assert all(TEMPORARY_MARK in name and name.startswith("file") for name in seen)
