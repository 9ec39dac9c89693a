"""Copies of shards on a node's own disk: complete, checked, never copied twice, safe with several at work."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cache import staging
from cache.atomic import TEMPORARY_MARK
from cache.errors import CacheError, ConfigError, ResourceError, StoppedError
from cache.formats import FORMATS
from cache.manifest import ShardIndex, index_file, load_shard_index, save_shard_index
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.staging import stage

from .conftest import assert_same, snapshot
from .test_remote import FEATURES, KEYS, make_cache

SILENT = Silent()


class Recorder(Silent):
    """Keeps what a progress bar would show."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, str]] = []
        self.done = 0

    def start(self, what: str, total: int, unit: str) -> None:
        self.phases.append((what, total, unit))

    def advance(self, count: int = 1) -> None:
        self.done += count


def shards_of(folder: Path) -> set[str]:
    return {file.name for file in (folder / "shards").iterdir() if file.suffix != ".json"}


@pytest.mark.parametrize("name", list(FORMATS))
def test_copies_only_what_the_splits_need(name: str, tmp_path: Path) -> None:
    source = FeatureCache(make_cache(tmp_path / "source", name))
    progress = Recorder()
    copy = stage(source, tmp_path / "disk", ["val"], progress)
    assert shards_of(copy.folder) == {source.shard_of(KEYS[0]).shard}, "val's two images are in one of two shards"
    ((what, total, unit),) = progress.phases
    assert (str(copy.folder) in what, total, unit) == (True, progress.done, "MB")
    both = stage(source, tmp_path / "disk", ["val", "train"], SILENT)
    assert both.folder == copy.folder
    assert len(shards_of(both.folder)) == 2
    shutil.rmtree(source.folder)
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(both.read(key), features)
    assert not list((tmp_path / "disk").rglob(f"*{TEMPORARY_MARK}*"))


def test_what_is_there_is_not_copied_again(tmp_path: Path) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    folder = stage(source, tmp_path / "disk", ["train"], SILENT).folder
    before = snapshot(folder)
    stage(source, tmp_path / "disk", ["train"], SILENT)
    assert snapshot(folder) == before


@pytest.mark.parametrize("spoil", ["flip", "cut", "without index", "index damaged"])
def test_a_bad_copy_is_replaced_and_the_good_one_left(spoil: str, tmp_path: Path) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    folder = stage(source, tmp_path / "disk", ["train"], SILENT).folder
    shard = folder / "shards" / source.shard_of(KEYS[0]).shard
    other = folder / "shards" / source.shard_of(KEYS[5]).shard
    kept = other.stat().st_ino
    content = bytearray(shard.read_bytes())
    if spoil == "flip":
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)
    elif spoil == "cut":
        shard.write_bytes(content[:-512])
    elif spoil == "without index":
        index_file(folder, shard.name).unlink()
    else:
        index_file(folder, shard.name).write_text("{}")
    copy = stage(source, tmp_path / "disk", ["train"], SILENT)
    for key, features in zip(KEYS, FEATURES, strict=True):
        assert_same(copy.read(key), features)
    assert other.stat().st_ino == kept


def test_an_index_without_a_checksum_is_checked_entry_by_entry(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "source")
    source = FeatureCache(folder)
    name = source.shard_of(KEYS[0]).shard
    index = load_shard_index(index_file(folder, name))
    save_shard_index(folder, ShardIndex(shard=name, num_bytes=index.num_bytes, entries=index.entries))
    copy = stage(source, tmp_path / "disk", ["train"], SILENT)
    assert_same(copy.read(KEYS[0]), FEATURES[0])
    before = snapshot(copy.folder)
    stage(source, tmp_path / "disk", ["train"], SILENT)
    assert snapshot(copy.folder) == before


def test_damage_at_the_source_is_not_copied(tmp_path: Path) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    shard = source.folder / "shards" / source.shard_of(KEYS[0]).shard
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CacheError, match=rf"(?s){shard}: the shard does not match its checksum.*--repair"):
        stage(source, tmp_path / "disk", ["train"], SILENT)
    assert not list((tmp_path / "disk").rglob(shard.name))
    assert not list((tmp_path / "disk").rglob(f"*{TEMPORARY_MARK}*"))


def test_an_index_of_another_shard_is_refused(tmp_path: Path) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    one, other = (index_file(source.folder, source.shard_of(key).shard) for key in (KEYS[0], KEYS[5]))
    shutil.copy(one, other)
    with pytest.raises(CacheError, match="its index belongs to another shard"):
        stage(source, tmp_path / "disk", ["train"], SILENT)


def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    free = staging.SPARE_BYTES + 1000
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"(?s)take 1 MB more, and 68 MB are free.*cache\.stage_to"):
        stage(source, tmp_path / "disk", ["train"], SILENT)
    assert not list((tmp_path / "disk").rglob("*.tar*"))
    monkeypatch.undo()
    stage(source, tmp_path / "disk", ["train"], SILENT)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage._replace(free=0))
    stage(source, tmp_path / "disk", ["train"], SILENT)  # nothing is missing, so nothing is needed


KILLED_WHILE_COPYING = """
import os, signal, sys
from pathlib import Path
from cache.formats.extents import ShardFile
from cache.progress import Silent
from cache.reader import FeatureCache
from cache.staging import stage

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

source = FeatureCache(Path(sys.argv[1]))
ShardFile.fill = killed  # the copy has been begun
stage(source, Path(sys.argv[2]), ["train"], Silent())
"""


def test_what_a_killed_copy_has_left_is_removed_later_and_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    process = [sys.executable, "-P", "-c", KILLED_WHILE_COPYING, str(source.folder), str(tmp_path / "disk")]
    assert subprocess.run(process, check=False).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "disk").rglob(f"*{TEMPORARY_MARK}*")
    left.write_bytes(bytes(2_500_000))
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    with monkeypatch.context() as patch:
        patch.setattr(staging.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ResourceError, match=r"3 MB are held by copies that are under way or were killed"):
            stage(source, tmp_path / "disk", ["train"], SILENT)
    stage(source, tmp_path / "disk", ["val"], SILENT)
    assert left.exists(), "whose it is may be at work"
    other = tmp_path / "disk" / left.name
    other.write_bytes(b"not in a folder of ours")
    for file in (left, other):
        os.utime(file, (1, 1))
    copy = stage(source, tmp_path / "disk", ["train"], SILENT)
    assert not left.exists()
    assert other.exists()
    assert_same(copy.read(KEYS[5]), FEATURES[5])


def test_a_full_disk_leaves_no_remains(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    monkeypatch.setattr(staging, "SPARE_BYTES", -(1 << 30))  # the check is outwitted: others take the space meanwhile
    (small_disk / "filler").write_bytes(bytes(900_000))
    with pytest.raises(ResourceError, match="full"):
        stage(source, small_disk, ["train"], SILENT)
    assert not list(small_disk.rglob(f"*{TEMPORARY_MARK}*"))
    (small_disk / "filler").unlink()
    assert_same(stage(source, small_disk, ["train"], SILENT).read(KEYS[4]), FEATURES[4])


def test_other_processes_of_the_node_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "POLL_SECONDS", 0.01)
    source = FeatureCache(make_cache(tmp_path / "source"))
    found: list[FeatureCache] = []
    waiting = threading.Thread(
        target=lambda: found.append(
            stage(FeatureCache(source.folder), tmp_path / "disk", ["train"], SILENT, copies=False)
        )
    )
    waiting.start()
    time.sleep(0.2)
    assert not found, "nothing is there yet"
    stage(source, tmp_path / "disk", ["train"], SILENT)
    waiting.join(10)
    assert_same(found[0].read(KEYS[3]), FEATURES[3])


def test_waiting_for_nobody_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "POLL_SECONDS", 0.01)
    source = FeatureCache(make_cache(tmp_path / "source"))
    with pytest.raises(CacheError, match=r"(?s)nothing has been copied here for 0 s.*process 0"):
        stage(source, tmp_path / "disk", ["train"], SILENT, copies=False, patience=0.1)


def test_waiting_can_be_stopped(tmp_path: Path) -> None:
    class Stopped(Silent):
        def advance(self, count: int = 1) -> None:
            assert count == 0, "it does nothing itself"
            raise StoppedError("stopped", do="go on")

    source = FeatureCache(make_cache(tmp_path / "source"))
    with pytest.raises(StoppedError):
        stage(source, tmp_path / "disk", ["train"], Stopped(), copies=False)


def test_a_waiting_process_does_not_take_an_older_list_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "POLL_SECONDS", 0.01)
    source = FeatureCache(make_cache(tmp_path / "source"))
    folder = stage(source, tmp_path / "disk", ["train"], SILENT).folder
    shutil.copy(source.folder / "splits" / "val.json", folder / "splits" / "train.json")
    with pytest.raises(CacheError, match="nothing has been copied"):
        stage(source, tmp_path / "disk", ["train"], SILENT, copies=False, patience=0.05)


def test_several_jobs_at_once(tmp_path: Path) -> None:
    source = make_cache(tmp_path / "source")
    results: list[Any] = []

    def job() -> None:
        try:
            copy = stage(FeatureCache(source), tmp_path / "disk", ["train"], SILENT)
            results.append([copy.read(key) for key in KEYS])
        except BaseException as error:
            results.append(error)

    jobs = [threading.Thread(target=job) for _ in range(4)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join(30)
    for read in results:
        assert isinstance(read, list), read
        for one, features in zip(read, FEATURES, strict=True):
            assert_same(one, features)
    assert len(results) == 4
    assert not list((tmp_path / "disk").rglob(f"*{TEMPORARY_MARK}*"))


def test_two_formats_of_one_fingerprint_lie_side_by_side(tmp_path: Path) -> None:
    folders = {
        stage(FeatureCache(make_cache(tmp_path / name, name)), tmp_path / "disk", ["train"], SILENT).folder
        for name in FORMATS
    }
    assert len(folders) == len(FORMATS)


def test_an_incomplete_split_is_refused(tmp_path: Path) -> None:
    folder = make_cache(tmp_path / "source")
    name = FeatureCache(folder).shard_of(KEYS[0]).shard
    index_file(folder, name).unlink()
    (folder / "shards" / name).unlink()
    with pytest.raises(CacheError, match="is not complete"):
        stage(FeatureCache(folder), tmp_path / "disk", ["train"], SILENT)


@pytest.mark.parametrize("form", ["$NODE_DISK/features", "${NODE_DISK}/features", "~/features"])
def test_variables_of_the_node_name_the_folder(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    for name in ("NODE_DISK", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "disk"))
    copy = stage(source, Path(form), ["val"], SILENT)
    assert copy.folder.parent == tmp_path / "disk" / "features"
    monkeypatch.chdir(tmp_path)
    assert stage(source, Path(form), ["val"], SILENT, copies=False).folder == copy.folder
    assert not list(tmp_path.glob("*NODE*"))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("$NODE_DISK/features", r"\$NODE_DISK is not set"),
        ("/mnt/${NODE_DISK}", r"\$NODE_DISK is not set"),
        ("$EMPTY/features", r"\$EMPTY is empty"),
        ("${NODE_DISK:-/tmp}", r"\$\{NODE_DISK:-/tmp\}"),
        ("~nobody-of-this-name/features", "~nobody-of-this-name"),
    ],
)
def test_a_variable_that_is_not_set_is_named(
    form: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FeatureCache(make_cache(tmp_path / "source"))
    monkeypatch.delenv("NODE_DISK", raising=False)
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=rf"cache\.stage_to.*{message}[\s\S]*What to do: "):
        stage(source, Path(form), ["val"], SILENT)
    assert snapshot(tmp_path) == before
