"""No file locks: network file systems do not keep them. Asked of the code, of the system, and of a whole run."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cache
from cache.formats import FORMATS

from .conftest import draw_images, random_features, write_rows

SOURCES = sorted(Path(cache.__file__).parent.rglob("*.py"))
LOCKING = {"fcntl", "msvcrt", "filelock", "portalocker", "flock", "lockf", "FileLock"}


def names_in(source: Path) -> set[str]:
    """Modules, attributes and names that a module uses."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=module, names=names):
                found |= {(module or "").partition(".")[0], *(alias.name for alias in names)}
            case ast.Attribute(attr=name) | ast.Name(id=name):
                found.add(name)
    return found


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.name)
def test_no_module_asks_for_a_lock(source: Path) -> None:
    assert not names_in(source) & LOCKING


@pytest.mark.parametrize("name", FORMATS)
def test_a_shard_is_not_locked_while_it_is_written_or_read(tmp_path: Path, name: str) -> None:
    """The HDF5 library locks what it opens unless it is told not to."""
    path = tmp_path / f"shard{FORMATS[name].suffix}"
    shard = FORMATS[name].create(path, 1)
    shard.append("a" * 64, random_features(0))
    inode = f":{path.stat().st_ino} "
    assert inode not in Path("/proc/locks").read_text()
    shard.finish()
    reader = FORMATS[name].open(path)
    assert inode not in Path("/proc/locks").read_text()
    reader.close()


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_run_takes_no_lock(tmp_path: Path, write_config: Callable[..., Path], name: str) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 3))
    config = write_config({"train": str(rows)}, cache={"format": name, "num_workers": 1, "shard_size": 12_000})
    command = [Path(sys.executable).with_name("pipeline"), "cache", "--config", config, "--split", "train"]
    log = tmp_path / "log"
    watched = ["strace", "-f", "-qq", "-y", "-e", "trace=flock,fcntl", "-o", log, *command]
    subprocess.run(watched, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True)
    calls = log.read_text(errors="replace").splitlines()
    assert calls, "nothing was watched"
    locks = [call for call in calls if "flock(" in call or "F_SETLK" in call or "F_OFD_SETLK" in call]
    assert not [call for call in locks if str(tmp_path) in call]
