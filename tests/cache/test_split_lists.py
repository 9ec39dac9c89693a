"""Two datasets whose images bear the same names, and one that was moved: told apart by their content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.errors import CacheError
from cache.manifest import load_split
from cache.records import ImageRef
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, committed_keys, draw_images, snapshot, write_rows

MakeConfig = Callable[..., PipelineConfig]


def dataset(folder: Path, *, seed: int, count: int = 3) -> Path:
    """A split whose images are called images/0.png, images/1.png, ..."""
    for number, file in enumerate(draw_images(folder / "images", count, seed=seed)):
        file.rename(folder / "images" / f"{number}.png")
    return write_rows(folder / "train.jsonl", [f"images/{number}.png" for number in range(count)])


@pytest.fixture
def two(tmp_path: Path, make_config: MakeConfig) -> tuple[PipelineConfig, PipelineConfig]:
    """Two configurations with one output folder, and a split `train` each; the first is cached."""
    one, other = (make_config({"train": str(dataset(tmp_path / name, seed=n))}) for n, name in enumerate("ab"))
    builder_of(one).run("train", SILENT)
    return one, other


def test_the_list_of_another_dataset_is_neither_trusted_nor_replaced(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path
) -> None:
    builder = builder_of(two[0])
    before = snapshot(builder.folder)
    with pytest.raises(CacheError, match=r"images/0\.png is another image there") as caught:
        builder_of(two[1]).run("train", SILENT)
    message = str(caught.value)
    assert f"{tmp_path / 'a'}," in message
    assert f"{tmp_path / 'b'}:" in message
    assert "give another output_dir" in message
    with pytest.raises(CacheError, match="another image there"):
        builder_of(two[1]).plan("train", SILENT)
    after = {name: state for name, state in snapshot(builder.folder).items() if not name.startswith("scans/")}
    assert after == before


def test_equal_sizes_and_times_do_not_make_two_datasets_one(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path
) -> None:
    for number in range(3):
        file, other = (tmp_path / name / "images" / f"{number}.png" for name in "ab")
        content = file.read_bytes()
        other.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # decoders stop before it
        stat = file.stat()
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(CacheError, match="is another image there"):
        builder_of(two[1]).run("train", SILENT)


def test_datasets_without_an_image_in_common(two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path) -> None:
    images = tmp_path / "b" / "images"
    for number in range(3):
        (images / f"{number}.png").rename(images / f"other{number}.png")
    write_rows(tmp_path / "b" / "train.jsonl", [f"images/other{number}.png" for number in range(3)])
    with pytest.raises(CacheError, match="no image in common"):
        builder_of(two[1]).run("train", SILENT)


def test_another_split_name_or_another_folder_is_a_way_out(
    two: tuple[PipelineConfig, PipelineConfig], make_config: MakeConfig, tmp_path: Path
) -> None:
    rows = str(tmp_path / "b" / "train.jsonl")
    assert builder_of(make_config({"other": rows})).run("other", SILENT).encoded_images == 3
    config = make_config({"train": rows}, output_dir=str(tmp_path / "second"))
    assert builder_of(config).run("train", SILENT).encoded_images == 3


def test_a_dataset_that_was_moved_is_hashed_again_and_encoded_once(
    two: tuple[PipelineConfig, PipelineConfig], make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = builder_of(two[0]).folder
    keys = committed_keys(folder)
    shutil.move(tmp_path / "a", tmp_path / "c")
    read: list[str] = []
    whole = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: read.append(self.path) or whole(self))
    config = make_config({"train": str(tmp_path / "c" / "train.jsonl")})
    for expected in (3, 0):
        assert builder_of(config).run("train", SILENT).encoded_images == 0
        assert len(read) == expected
        read.clear()
    listed = load_split(folder, "train")
    assert listed is not None
    assert listed.root == str((tmp_path / "c").resolve())
    assert committed_keys(folder) == keys


def test_another_way_to_the_same_folder_is_the_same_root(
    two: tuple[PipelineConfig, PipelineConfig],
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.setattr(ImageRef, "read", None)  # nothing is read
    builder_of(make_config({"train": str(tmp_path / "link" / "train.jsonl")})).run("train", SILENT)


def test_lists_of_earlier_versions_have_no_root_and_are_read(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path
) -> None:
    builder = builder_of(two[0])
    file = builder.folder / "splits" / "train.json"
    old = json.loads(file.read_text())
    assert old.pop("root") == str((tmp_path / "a").resolve())
    del old["digest"]
    file.write_text(json.dumps(old))
    assert builder_of(two[0]).run("train", SILENT).encoded_images == 0
    assert json.loads(file.read_text())["root"]
