"""Two datasets whose images bear the same names, and one that was moved: told apart by their content."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cache import split_lists
from cache.config import DataConfig, SplitConfig
from cache.dataset import read_split
from cache.errors import CacheError
from cache.keys import image_key
from cache.records import ImageRef, Stamp
from cache.split_files import load_split
from cache.split_lists import changed_images
from pipeline.config import PipelineConfig

from .conftest import DRAWN, SILENT, builder_of, committed_keys, draw_images, snapshot, write_rows

MakeConfig = Callable[..., PipelineConfig]


def dataset(folder: Path, *, seed: int, count: int = 3) -> Path:
    """A split whose images are called images/0.png, images/1.png, ..."""
    for number, file in enumerate(draw_images(folder / "images", count, seed=seed)):
        file.rename(folder / "images" / f"{number}.png")
    return write_rows(folder / "train.jsonl", [f"images/{number}.png" for number in range(count)])


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the images that are read from now on; the real method reads them."""
    read: list[str] = []
    whole = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: read.append(self.path) or whole(self))
    return read


def put(content: bytes, file: Path, like: Path) -> None:
    """Write a file, with the time of another one."""
    file.write_bytes(content)
    os.utime(file, ns=(like.stat().st_atime_ns, like.stat().st_mtime_ns))


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
        put(content[:-1] + bytes([content[-1] ^ 1]), other, like=file)  # decoders stop before it
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
    read = reads(monkeypatch)
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


def test_a_dataset_that_was_moved_and_changed_in_part_is_taken_up(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path, make_config: MakeConfig
) -> None:
    shutil.move(tmp_path / "a", tmp_path / "c")
    shutil.copy(tmp_path / "b" / "images" / "1.png", tmp_path / "c" / "images" / "1.png")
    config = make_config({"train": str(tmp_path / "c" / "train.jsonl")})
    assert builder_of(config).run("train", SILENT).encoded_images == 1
    listed = load_split(builder_of(config).folder, "train")
    assert listed is not None
    files = [tmp_path / "c" / "images" / f"{number}.png" for number in range(3)]
    assert [image.key for image in listed.images] == [image_key(file.read_bytes()) for file in files]


def test_a_root_one_level_up_is_known_by_the_content(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path, make_config: MakeConfig
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", [f"a/images/{number}.png" for number in range(3)])
    assert builder_of(make_config({"train": str(rows)})).run("train", SILENT).encoded_images == 0


def test_a_copy_that_kept_the_times_is_read_in_part(
    two: tuple[PipelineConfig, PipelineConfig],
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    config = make_config({"train": str(tmp_path / "c" / "train.jsonl")})
    monkeypatch.setattr(split_lists, "HASHED", 2)
    os.utime(tmp_path / "c" / "images" / "1.png", (1e9, 1e9))  # this one is read anyway
    read = reads(monkeypatch)
    assert len(builder_of(config).plan("train", SILENT).images) == 3
    assert sorted(read) == ["images/0.png", "images/1.png", "images/2.png"]
    shutil.copystat(tmp_path / "a" / "images" / "1.png", tmp_path / "c" / "images" / "1.png")
    read.clear()
    assert len(builder_of(config).plan("train", SILENT).images) == 3
    assert sorted(read) == ["images/0.png", "images/2.png"]


def test_a_sample_that_differs_in_part_has_everything_read(
    two: tuple[PipelineConfig, PipelineConfig],
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    file = tmp_path / "c" / "images" / "2.png"
    put(file.read_bytes()[:-1] + b"!", file, like=tmp_path / "a" / "images" / "2.png")
    config = make_config({"train": str(tmp_path / "c" / "train.jsonl")})
    read = reads(monkeypatch)
    images = builder_of(config).plan("train", SILENT).images
    assert len(read) == 6, "all as the sample, and all again"
    assert images[2].key == image_key(file.read_bytes())


def test_another_dataset_is_refused_before_all_of_it_is_read(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_lists, "HASHED", 2)
    read = reads(monkeypatch)
    with pytest.raises(CacheError, match=r"images/0\.png is another image there"):
        builder_of(two[1]).run("train", SILENT)
    assert read == [], "their sizes differ"
    for number in range(3):
        file, other = (tmp_path / name / "images" / f"{number}.png" for name in "ab")
        put(file.read_bytes()[:-1] + b"!", other, like=file)
    with pytest.raises(CacheError, match=r"images/0\.png is another image there"):
        builder_of(two[1]).run("train", SILENT)
    assert sorted(read) == ["images/0.png", "images/2.png"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EIO])
def test_training_compares_no_image_that_it_cannot_look_at(
    two: tuple[PipelineConfig, PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    listed = load_split(builder_of(two[0]).folder, "train")
    assert listed is not None
    reached = read_split(two[0].data, "train")
    (tmp_path / "a" / "images" / "1.png").write_bytes(b"another one")
    assert list(changed_images(reached.records, listed, reached.root, SILENT)) == ["images/1.png"]
    stat = os.stat
    out_of_reach = [reached.root]

    def failing(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(path).startswith(out_of_reach[0]):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", failing)
    assert changed_images(reached.records, listed, reached.root, SILENT) == {}
    out_of_reach[0] += "/images"
    assert changed_images(reached.records, listed, reached.root, SILENT) == {}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder of three Parquet files with two images each, all of one size."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "tables"
    folder.mkdir()
    for number in range(3):
        rows = []
        for shade in (10 * number, 10 * number + 5):
            content = io.BytesIO()
            Image.new("RGB", (64, 64), (shade, 0, 0)).save(content, "BMP")
            image = {"bytes": content.getvalue(), "path": None}
            rows.append({"image": image, "question": "What is it?", "answer": "A shade."})
        file = folder / f"{number}.parquet"
        datasets.Dataset.from_list(rows).to_parquet(file)
        os.utime(file, (DRAWN + number, DRAWN + number))
    return folder


def test_a_table_that_is_not_the_newest_is_removed(tables: Path, make_config: MakeConfig) -> None:
    config = make_config({"train": str(tables)})
    builder = builder_of(config)
    assert builder.run("train", SILENT).encoded_images == 6
    before = load_split(builder.folder, "train")
    assert before is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ImageRef, "read", None)  # nothing is read
        assert builder_of(config).run("train", SILENT).encoded_images == 0
    (tables / "0.parquet").unlink()

    found = read_split(config.data, "train")
    refs = [ref for record in found.records for ref in record.images]
    assert set(changed_images(found.records, before, found.root, SILENT)) == {ref.path for ref in refs}
    assert builder_of(config).run("train", SILENT).encoded_images == 0
    after = load_split(builder.folder, "train")
    assert after is not None
    assert {image.path: image.key for image in after.images} == {ref.path: image_key(ref.read()) for ref in refs}


def test_tables_that_changed_places(tables: Path) -> None:
    """Their names, sizes and times are the same as before, taken together."""

    def stamps() -> set[Stamp | None]:
        split = SplitConfig(path=str(tables))
        records = read_split(DataConfig(splits={"train": split}), "train").records
        return {ref.stamp() for record in records for ref in record.images}

    (before,) = stamps()
    assert stamps() == {before}
    (tables / "0.parquet").rename(tables / "other")
    (tables / "1.parquet").rename(tables / "0.parquet")
    (tables / "other").rename(tables / "1.parquet")
    (after,) = stamps()
    assert before is not None
    assert after is not None
    assert after.mtime_ns != before.mtime_ns
    assert after.changed_ns == before.changed_ns == (DRAWN + 2) * 10**9
