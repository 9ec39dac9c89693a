"""Scanning images: cut short and gone on with, files that cannot be read now, files that are no images at all."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.errors import DataError, ReadError, StoppedError
from cache.headers import HEAD_BYTES, read_headers
from cache.prune import survey_holdings
from cache.reader import FeatureCache
from cache.records import MAX_IMAGE_BYTES, ImageRef
from cache.scan import AHEAD, HEAD_FIRST_BYTES, THREADS
from cache.split_files import load_refused, load_split
from pipeline.config import PipelineConfig

from .conftest import DRAWN, SILENT, builder_of, committed_keys, draw_images, write_rows

MakeConfig = Callable[..., PipelineConfig]
COUNT = 3 * AHEAD


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read, in order; the real method reads them."""
    seen: list[str] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: seen.append(self.name) or whole(self))
    return seen


def images_of(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".png")]


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, first: int = 0) -> None:
    """Reading the file of this name fails, from the given time on."""
    whole, times = Path.read_bytes, [0]

    def read_bytes(self: Path) -> bytes:
        if self.name == name:
            times[0] += 1
            if times[0] > first:
                raise OSError(number, os.strerror(number), str(self))
        return whole(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)


@pytest.fixture
def many(tmp_path: Path, make_config: MakeConfig) -> PipelineConfig:
    return make_config({"train": str(write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", COUNT)))})


def test_a_scan_that_is_stopped_ends_at_once_and_goes_on_where_it_was(many: PipelineConfig, read: list[str]) -> None:
    builder = builder_of(many)
    with pytest.raises(StoppedError, match="what is known of the images so far is kept"):
        builder.list_images("train", SILENT, should_stop=lambda: len(images_of(read)) >= 2)
    stopped = len(images_of(read))
    assert stopped <= AHEAD + THREADS + 1 < COUNT
    assert load_split(builder.folder, "train") is None, "a list that lacks images would be a wrong one"
    read.clear()
    plan = builder_of(many).list_images("train", SILENT)
    assert len(plan.images) == COUNT
    assert len(images_of(read)) < COUNT
    assert not list(builder.folder.glob("scans/*"))
    read.clear()
    builder_of(many).list_images("train", SILENT)
    assert images_of(read) == []


def test_a_bad_record_does_not_cost_the_scan(many: PipelineConfig, tmp_path: Path, read: list[str]) -> None:
    bad = tmp_path / "images" / "0-5.png"
    content = bad.read_bytes()
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0-5\.png"):
        builder_of(many).list_images("train", SILENT)
    bad.write_bytes(content)
    read.clear()
    builder_of(many).list_images("train", SILENT)
    assert images_of(read) == ["0-5.png"]


def test_a_damaged_note_is_not_used(many: PipelineConfig, read: list[str]) -> None:
    builder = builder_of(many)
    with pytest.raises(StoppedError):
        builder.list_images("train", SILENT, should_stop=lambda: True)
    (note,) = builder.folder.glob("scans/*.json")
    note.write_bytes(note.read_bytes()[:-100])
    read.clear()
    assert len(builder_of(many).list_images("train", SILENT).images) == COUNT
    assert len(images_of(read)) == COUNT


def test_a_scan_that_is_cut_short_leaves_a_folder_that_says_whose_it_is(many: PipelineConfig) -> None:
    builder = builder_of(many)
    with pytest.raises(StoppedError):
        builder.list_images("train", SILENT, should_stop=lambda: True)
    (holding,) = survey_holdings(many.cache_dir, builder.fingerprint, any_backend=False)
    assert holding.manifest == builder.manifest
    assert holding.in_use
    builder.list_images("train", SILENT)
    assert not (builder.folder / "scans").exists()


def test_a_plan_writes_nothing(many: PipelineConfig) -> None:
    builder = builder_of(many)
    builder.plan("train", SILENT)
    assert not builder.folder.exists()


def test_parts_that_start_later_take_the_list_of_the_first(many: PipelineConfig, read: list[str]) -> None:
    """What `--gpus` does before it starts a process for each."""
    from cache.parts import Part

    builder_of(many).list_images("train", SILENT, part=Part(0, 2))
    read.clear()
    for index in (0, 1):
        assert len(builder_of(many).plan("train", SILENT, Part(index, 2)).images) == COUNT
    assert images_of(read) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES])
def test_an_image_that_cannot_be_read_now_is_no_bad_record(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 3))
    config = make_config({"train": str(rows)}, data={"on_bad_record": "report", "max_bad_share": 1.0})
    for first in (0, 1):  # while it is scanned; while it is encoded
        with monkeypatch.context() as patch:
            failing(patch, "0-1.png", number, first=first)
            with pytest.raises(ReadError, match=rf"0-1\.png: the file cannot be read: {os.strerror(number)}") as caught:
                builder_of(config).run("train", SILENT)
        assert caught.value.exit_code == 5
        assert "run the same command again" in str(caught.value.do)
        assert load_refused(builder_of(config).folder) == {}
    summary = builder_of(config).run("train", SILENT)
    assert summary.rejected == []
    assert len(FeatureCache(summary.folder).split("train").images) == 3


def test_what_was_encoded_before_a_failing_disk_is_kept(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 3))
    config = make_config({"train": str(rows)}, cache={"num_workers": 1})
    builder_of(config).list_images("train", SILENT)
    failing(monkeypatch, "0-2.png", errno.EIO)
    with pytest.raises(ReadError):
        builder_of(config).run("train", SILENT)
    assert committed_keys(config.cache_dir), "all but what was on its way to the tower"


@pytest.mark.parametrize("size", [HEAD_FIRST_BYTES + 1, MAX_IMAGE_BYTES + 1])
def test_a_huge_file_that_is_no_image_is_not_read(
    tmp_path: Path, make_config: MakeConfig, read: list[str], size: int
) -> None:
    images = draw_images(tmp_path / "images", 1)
    video = tmp_path / "images" / "video.png"
    with video.open("wb") as file:
        file.write(b"\0\0\0\x20ftypisom" + bytes(2 * HEAD_BYTES))
        file.truncate(size)
    config = make_config({"train": str(write_rows(tmp_path / "train.jsonl", [images[0], video]))})
    with pytest.raises(DataError, match=r"video\.png: (not an image|the file has 1\.1 GB)") as caught:
        builder_of(config).run("train", SILENT)
    assert str(caught.value.where).endswith("train.jsonl:2")
    (header,) = read_headers([ImageRef("video.png", video)], SILENT)
    assert isinstance(header, DataError)
    assert "video.png" not in read


def test_a_device_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a regular file"):
        ImageRef("zero", Path("/dev/zero")).read()


def test_a_file_that_was_just_written_is_hashed_again(tmp_path: Path, make_config: MakeConfig, read: list[str]) -> None:
    """Another one may follow within the same tick of the file system's clock, of the same size."""
    now, old = draw_images(tmp_path / "images", 2)
    later = time.time_ns() + 60 * 10**9
    os.utime(now, ns=(later, later))
    config = make_config({"train": str(write_rows(tmp_path / "train.jsonl", [now, old]))})
    builder = builder_of(config)
    for moment, again in ((later + 10**9, [now.name]), (later + 10**10, []), (DRAWN * 10**9, [])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time_ns", lambda moment=moment: moment)
            builder.list_images("train", SILENT)
            read.clear()
            builder.list_images("train", SILENT)
        assert images_of(read) == again


NAMES = {
    "too long": ("images/" + 300 * "a" + ".png", "no image file can have this name: File name too long"),
    "too long a folder": (300 * "a" + "/a.png", "no image file can have this name: File name too long"),
    "too long a path": (3000 * "ab/" + "a.png", "no image file can have this name: File name too long"),
    "below a file": ("images/0-0.png/a.png", "no image file can have this name: Not a directory"),
    "a folder": ("images/folder", "not a regular file"),
    "a loop": ("images/loop.png", "no image file can have this name: Too many levels of symbolic links"),
    "below a loop": ("images/loop.png/a.png", "no image file can have this name: Too many levels of symbolic links"),
    "a null character": ("images/a\0.png", "has a null character"),
    "a link to nothing": ("images/nowhere.png", "does not exist"),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_name_that_no_image_can_have_is_a_bad_record(tmp_path: Path, make_config: MakeConfig, case: str) -> None:
    name, reason = NAMES[case]
    (image,) = draw_images(tmp_path / "images", 1)
    (tmp_path / "images" / "folder").mkdir()
    (tmp_path / "images" / "loop.png").symlink_to("loop.png")
    (tmp_path / "images" / "nowhere.png").symlink_to("nothing.png")
    rows = str(write_rows(tmp_path / "train.jsonl", [image, name]))
    with pytest.raises(DataError, match=reason) as caught:
        builder_of(make_config({"train": rows})).run("train", SILENT)
    assert str(caught.value.where).endswith("train.jsonl:2")
    config = make_config({"train": rows}, data={"on_bad_record": "report", "max_bad_share": 0.5})
    (rejection,) = builder_of(config).run("train", SILENT).rejected
    assert rejection.source.endswith("train.jsonl:2")
    assert reason in rejection.reason
