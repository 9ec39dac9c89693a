"""Images that cannot be used: named and refused, or left out and counted; what was computed is kept either way."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from cache.bad_records import reject_images
from cache.errors import DataError
from cache.parts import Part, part_of
from cache.reader import FeatureCache
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, committed_keys, draw_images, snapshot, write_rows

MakeConfig = Callable[..., PipelineConfig]


def key_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    content = {"cut": data[: len(data) // 2], "empty": b"", "text": b"no image", "header": data[:20]}
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[how])


@pytest.mark.parametrize("how", ["cut", "empty", "text", "header", "missing"])
def test_a_bad_image_ends_the_run_and_is_named(tmp_path: Path, make_config: MakeConfig, how: str) -> None:
    files = draw_images(tmp_path / "images", 3)
    rows = write_rows(tmp_path / "train.jsonl", files)
    damage(files[1], how)
    config = make_config({"train": str(rows)})
    with pytest.raises(DataError, match=r"images/0-1\.png") as caught:
        builder_of(config).run("train", SILENT)
    assert caught.value.where is not None
    assert caught.value.where.endswith("train.jsonl:2")
    assert caught.value.do
    if how == "cut":  # the header is intact: found only when it is decoded, and what came before is kept
        assert committed_keys(config.cache_dir) == [key_of(files[0])]
    draw_images(tmp_path / "images", 3)
    assert builder_of(config).run("train", SILENT).encoded_images == (2 if how == "cut" else 3)


@pytest.mark.parametrize("how", ["cut", "empty", "text", "header", "missing"])
def test_a_bad_image_is_left_out_and_reported(
    tmp_path: Path, make_config: MakeConfig, tower_calls: dict[str, int], how: str
) -> None:
    files = draw_images(tmp_path / "images", 3)
    rows = write_rows(tmp_path / "train.jsonl", [files[0], files[1], [str(files[1]), str(files[2])], files[2]])
    damage(files[1], how)
    config = make_config({"train": str(rows)}, data={"on_bad_record": "report", "max_bad_share": 0.5})
    summary = builder_of(config).run("train", SILENT)
    assert [Path(r.source).name for r in summary.rejected] == ["train.jsonl:2", "train.jsonl:3"]
    assert all("images/0-1.png" in r.reason for r in summary.rejected)
    listed = FeatureCache(summary.folder).split("train")
    assert [image.path for image in listed.images] == ["images/0-0.png", "images/0-2.png"]
    assert list(listed.refused) == ["images/0-1.png"]
    assert summary.encoded_images == 2
    loads, before = tower_calls["load"], snapshot(summary.folder)
    again = builder_of(config).run("train", SILENT)
    assert again.rejected == summary.rejected
    assert (tower_calls["load"], snapshot(summary.folder)) == (loads, before)
    draw_images(tmp_path / "images", 3)
    mended = builder_of(config).run("train", SILENT)
    assert (mended.encoded_images, mended.rejected) == (1, [])


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_too_many_bad_images_fail_the_run(tmp_path: Path, make_config: MakeConfig, how: str) -> None:
    files = draw_images(tmp_path / "images", 4)
    rows = write_rows(tmp_path / "train.jsonl", files)
    for file in files[:2]:
        damage(file, how)
    config = make_config({"train": str(rows)}, data={"on_bad_record": "report", "max_bad_share": 0.49})
    with pytest.raises(DataError, match="2 of 4 records"):
        builder_of(config).run("train", SILENT)
    enough = config.model_copy(update={"data": config.data.model_copy(update={"max_bad_share": 0.5})})
    assert len(builder_of(enough).run("train", SILENT).rejected) == 2


def test_the_share_of_bad_images_is_that_of_all_parts_together(tmp_path: Path, make_config: MakeConfig) -> None:
    files = draw_images(tmp_path / "images", 24)
    parts: dict[int, list[Path]] = {0: [], 1: []}
    for file in files:
        damage(file, "cut")
        parts[part_of(key_of(file), 2)].append(file)
    bad = [*parts[0][:3], *parts[1][:3]]
    draw_images(tmp_path / "good", 18, seed=1)
    rows = write_rows(tmp_path / "train.jsonl", [*bad, *sorted((tmp_path / "good").iterdir())])
    data = {"on_bad_record": "report", "max_bad_share": 0.2}  # of 24 rows 4 may be bad; each part has 3
    config = make_config({"train": str(rows)}, data=data)
    builder_of(config).run("train", SILENT, part=Part(0, 2))
    with pytest.raises(DataError, match=r"6 of 24 records cannot be used: 25\.00%"):
        builder_of(config).run("train", SILENT, part=Part(1, 2))
    with pytest.raises(DataError, match="6 of 24 records"):
        builder_of(config).run("train", SILENT, part=Part(0, 2))


def test_bad_images_are_looked_up_in_the_records_once(
    tmp_path: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each: with many of both that would take hours."""
    calls: dict[int, int] = {}
    for count in (2, 6):
        files = draw_images(tmp_path / f"images{count}", 8)
        for file in files[:count]:
            damage(file, "cut")
        rows = write_rows(tmp_path / "train.jsonl", files)
        data = {"on_bad_record": "report", "max_bad_share": 1.0}
        config = make_config({"train": str(rows)}, data=data, output_dir=str(tmp_path / str(count)))
        with monkeypatch.context() as patch:
            seen: list[int] = []
            patch.setattr("cache.build.reject_images", lambda *a, s=seen: s.append(1) or reject_images(*a))
            assert len(builder_of(config).run("train", SILENT).rejected) == count
        calls[count] = len(seen)
    assert calls[2] == calls[6]


def test_a_name_that_no_file_can_have(tmp_path: Path, make_config: MakeConfig) -> None:
    rows = write_rows(tmp_path / "train.jsonl", ["images/" + 300 * "a" + ".png"])
    with pytest.raises(DataError, match="image file") as caught:
        builder_of(make_config({"train": str(rows)})).run("train", SILENT)
    assert str(caught.value.where).endswith("train.jsonl:1")


def test_an_image_larger_than_the_limit(tmp_path: Path, make_config: MakeConfig) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 1))
    with pytest.raises(DataError, match="max_image_pixels = 100"):
        builder_of(make_config({"train": str(rows)}, cache={"max_image_pixels": 100})).run("train", SILENT)
