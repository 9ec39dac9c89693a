"""A cache on a file system that cannot be written: complete, it is found so; what would have to be written is told."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from cache import documents
from cache.split_files import load_split, save_split

from .conftest import SILENT, builder_of, committed_keys, draw_images, snapshot, write_rows


@pytest.fixture
def make_read_only() -> Iterator[Callable[[Path], None]]:
    """Mounts a folder over itself, for reading only."""
    mounted: list[Path] = []

    def mount(folder: Path) -> None:
        try:
            subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True, text=True, check=True)
            mounted.append(folder)
            again = ["mount", "-o", "remount,bind,ro", str(folder)]
            subprocess.run(again, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"A READ-ONLY CACHE IS NOT TESTED FOR REAL HERE: nothing can be mounted ({reason.strip()})")

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def age(folder: Path) -> None:
    """Make the list of split `train` one of an earlier version, with a file that was just written."""
    file = folder / "splits" / "train.json"
    old = json.loads(file.read_text())
    del old["digest"], old["root"]
    old["images"][0]["mtime_ns"] = 0
    file.write_text(json.dumps(old))


def test_a_complete_cache_needs_no_writing(cached: Any, make_read_only: Callable[[Path], None], tmp_path: Path) -> None:
    builder, config = cached
    make_read_only(builder.folder)
    before = snapshot(builder.folder)
    assert builder_of(config).run("train", SILENT).encoded_images == 0
    write_rows(tmp_path / "train.jsonl", [*draw_images(tmp_path / "images", 4), *draw_images(tmp_path / "images", 1)])
    assert builder_of(config).run("train", SILENT).num_records == 5, "another question"
    write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 5))
    with pytest.raises(OSError, match="Read-only file system"):
        builder_of(config).run("train", SILENT)
    assert snapshot(builder.folder) == before


def test_a_complete_cache_with_an_old_list_needs_no_writing(
    cached: Any, make_read_only: Callable[[Path], None]
) -> None:
    builder, config = cached
    age(builder.folder)
    make_read_only(builder.folder)
    before, keys = snapshot(builder.folder), committed_keys(builder.folder)
    assert builder_of(config).run("train", SILENT).encoded_images == 0
    assert snapshot(builder.folder) == before
    assert committed_keys(builder.folder) == keys


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_only_a_list_that_reads_the_same_may_stay(cached: Any, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    folder = cached[0].folder
    new = load_split(folder, "train")
    assert new is not None
    age(folder)
    old = load_split(folder, "train")

    def failing(target: Path, text: str) -> None:
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(documents, "write_text", failing)

    def refuses() -> AbstractContextManager[object]:
        return pytest.raises(OSError, match=re.escape(os.strerror(number)))

    with refuses() if number == errno.EIO else nullcontext():
        save_split(folder, new)
    for change in ({"images": new.images[1:]}, {"refused": {"a.png": "is empty"}}, {"num_parts": 2}):
        with refuses():
            save_split(folder, new.model_copy(update=change))
    assert load_split(folder, "train") == old
