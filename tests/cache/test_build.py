"""The whole cache stage on real images: what is cached once, what is done again, what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.errors import CacheError, ConfigError, DataError, StoppedError
from cache.reader import FeatureCache
from cache.split_files import load_split
from pipeline.config import PipelineConfig

from .conftest import (
    DRAWN,
    SILENT,
    assert_same_entries,
    builder_of,
    committed_keys,
    draw_images,
    snapshot,
    write_rows,
)

MakeConfig = Callable[..., PipelineConfig]


def key_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def test_the_sample_data_in_every_format(data_dir: Path, make_config: MakeConfig) -> None:
    files = ["train.jsonl", "val.jsonl", "qwen_finetune.json", "sharegpt.json", "messages.jsonl", "stages.jsonl"]
    splits = {Path(file).stem: str(data_dir / file) for file in files}
    builder = builder_of(make_config(splits))
    for split in splits:
        summary = builder.run(split, SILENT)
        assert not summary.rejected
        assert summary.num_records > 0
        listed = FeatureCache(builder.folder).split(split)
        assert summary.distinct_images == len({image.key for image in listed.images})
        for image in listed.images:
            assert image.key == key_of(data_dir / image.path)
    features = FeatureCache(builder.folder)
    images = {key_of(file) for file in (data_dir / "images").iterdir()}
    assert set(features.keys()) <= images
    assert committed_keys(builder.folder) == features.keys(), "an entry that stands twice"
    for key in features.keys():  # noqa: SIM118  (not a mapping)
        entry = features.read(key)
        assert entry.num_tokens == int(entry.image_grid_thw.prod()) // 4
        assert entry.num_tokens <= 16


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [(None, 4 * 128 * 2), ("float32", 4 * 128 * 4)])
def test_dtype_and_size_are_as_asked(
    tmp_path: Path, write_config: Any, make_config: MakeConfig, dtype: str | None, bytes_per_token: int
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 3))
    config = make_config({"train": str(rows)}, cache={"dtype": dtype} if dtype else {})
    if dtype is None:
        cache = config.cache.model_validate({"max_pixels": 128 * 128, "num_workers": 0})
        config = config.model_copy(update={"cache": cache})
    builder = builder_of(config)
    plan = builder.plan("train", SILENT)
    summary = builder.run("train", SILENT)
    assert plan.todo_bytes == summary.image_tokens * bytes_per_token
    assert plan.todo_bytes <= summary.written_bytes <= plan.todo_bytes + 8192  # the header, up to the next page
    features = FeatureCache(builder.folder)
    for image in features.split("train").images:
        assert features[image.path].image_embeds.dtype == (torch.float32 if dtype else torch.bfloat16)


def test_one_image_is_one_entry_under_all_its_names(
    tmp_path: Path, make_config: MakeConfig, tower_calls: dict[str, int]
) -> None:
    one, two = draw_images(tmp_path / "images", 2)
    copy = shutil.copy(one, tmp_path / "images" / "copy.png")
    train = write_rows(tmp_path / "train.jsonl", [one, copy, one, [str(one), str(two), str(one)]])
    val = write_rows(tmp_path / "val.jsonl", [copy])
    builder = builder_of(make_config({"train": str(train), "val": str(val)}))
    first, second = builder.run("train", SILENT), builder.run("val", SILENT)
    assert (first.distinct_images, first.encoded_images) == (2, 2)
    assert (second.distinct_images, second.encoded_images, second.written_bytes) == (1, 0, 0)
    assert tower_calls == {"load": 1, "encode": 2}
    assert committed_keys(builder.folder) == sorted([key_of(one), key_of(two)])
    assert [image.path for image in FeatureCache(builder.folder).split("train").images] == [
        "images/0-0.png",
        "images/copy.png",
        "images/0-1.png",
    ]


def test_a_second_run_touches_nothing(cached: Any, tower_calls: dict[str, int]) -> None:
    builder, config = cached
    before = snapshot(builder.folder)
    assert len([name for name in before if name.endswith(".safetensors")]) > 1
    summary = builder_of(config).run("train", SILENT)
    assert snapshot(builder.folder) == before
    assert tower_calls == {"load": 0, "encode": 0}
    assert (summary.encoded_images, summary.written_bytes, summary.distinct_images) == (0, 0, 4)


def test_workers_and_shard_size_change_no_number(tmp_path: Path, make_config: MakeConfig, cached: Any) -> None:
    builder, config = cached
    cache = config.cache.model_copy(update={"num_workers": 2, "shard_size": 1 << 30, "dir": tmp_path / "other"})
    other = builder_of(config.model_copy(update={"cache": cache}))
    other.run("train", SILENT)
    assert other.folder.name == builder.folder.name
    assert len(list((other.folder / "shards").glob("*.json"))) == 1
    assert_same_entries(builder.folder, other.folder)


@pytest.mark.parametrize("images", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_goes_on_where_it_was_stopped(
    tmp_path: Path, cached: Any, tower_calls: dict[str, int], images: int, workers: int
) -> None:
    whole, config = cached
    cache = config.cache.model_copy(update={"dir": tmp_path / "stopped", "num_workers": workers})
    config = config.model_copy(update={"cache": cache})
    builder = builder_of(config)
    with pytest.raises(StoppedError):
        builder.run("train", SILENT, should_stop=lambda: tower_calls["encode"] >= images)
    assert len(committed_keys(builder.folder)) == images
    with pytest.raises(CacheError, match=f"{4 - images} of 4 images are missing"):
        FeatureCache(builder.folder).split("train")
    summary = builder_of(config).run("train", SILENT)
    assert (summary.encoded_images, tower_calls["encode"]) == (4 - images, 4)
    assert_same_entries(builder.folder, whole.folder)
    assert committed_keys(builder.folder) == committed_keys(whole.folder)


def test_a_bug_in_between_costs_nothing_that_was_computed(
    cached: Any, tmp_path: Path, tower_calls: dict[str, int]
) -> None:
    _, config = cached
    cache = config.cache.model_copy(update={"dir": tmp_path / "other", "shard_size": 1 << 30})
    builder = builder_of(config.model_copy(update={"cache": cache}))

    def should_stop() -> bool:
        if tower_calls["encode"] == 3:
            raise ZeroDivisionError
        return False

    with pytest.raises(ZeroDivisionError):
        builder.run("train", SILENT, should_stop)
    assert len(committed_keys(builder.folder)) == 3


@pytest.mark.parametrize(
    ("tail", "later", "encoded"),
    [(b"b", 1, 1), (b"longer", 0, 1), (b"a", 1, 0)],
    ids=["other time", "other size", "other time, same bytes"],
)
def test_a_changed_file_is_noticed(
    cached: Any, tmp_path: Path, tower_calls: dict[str, int], tail: bytes, later: int, encoded: int
) -> None:
    builder, config = cached
    file = tmp_path / "images" / "0-1.png"
    picture = file.read_bytes()
    file.write_bytes(picture + b"a")  # decoders stop at the end of the picture, but the bytes are others
    os.utime(file, (DRAWN, DRAWN))
    builder_of(config).run("train", SILENT)
    old_key, stat, before = key_of(file), file.stat(), tower_calls["encode"]
    file.write_bytes(picture + tail)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + later))
    assert builder_of(config).run("train", SILENT).encoded_images == tower_calls["encode"] - before == encoded
    listed = {image.path: image.key for image in FeatureCache(builder.folder).split("train").images}
    assert listed["images/0-1.png"] == key_of(file)
    assert old_key in FeatureCache(builder.folder), "nothing is ever deleted"


def test_features_are_never_stored_under_the_key_of_other_bytes(cached: Any, tmp_path: Path) -> None:
    """A file is overwritten without a trace in size and time, and its old entry is gone: the list is out of date."""
    builder, config = cached
    file, other = draw_images(tmp_path / "images", 2)
    builder.run("train", SILENT)
    stat = file.stat()
    file.write_bytes(other.read_bytes().ljust(stat.st_size, b"\0")[: stat.st_size])
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.rmtree(builder.folder / "shards")
    with pytest.raises(DataError, match=r"not the one that was hashed before(.|\n)*touch the file"):
        builder_of(config).run("train", SILENT)
    assert committed_keys(builder.folder) == []
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    builder_of(config).run("train", SILENT)
    listed = {image.path: image.key for image in FeatureCache(builder.folder).split("train").images}
    assert listed["images/0-0.png"] == listed["images/0-1.png"] == key_of(other)


def test_a_text_only_split_costs_no_tower(tmp_path: Path, make_config: MakeConfig, tower_calls: dict[str, int]) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
    builder = builder_of(make_config({"train": str(file)}, data={"format": "flat"}))
    summary = builder.run("train", SILENT)
    assert (summary.num_records, summary.distinct_images, summary.image_tokens) == (1, 0, 0)
    assert tower_calls == {"load": 0, "encode": 0}
    cache = FeatureCache(builder.folder)
    assert len(cache) == 0
    assert cache.split("train").images == []


def test_images_in_parquet_rows(tmp_path: Path, make_config: MakeConfig, tower_calls: dict[str, int]) -> None:
    datasets = pytest.importorskip("datasets")
    files = draw_images(tmp_path / "images", 3)
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": None}, "question": "?", "answer": "!"}
        for file in [*files, files[0]]
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    os.utime(tmp_path / "train.parquet", (DRAWN, DRAWN))
    config = make_config({"train": str(tmp_path / "train.parquet")})
    builder = builder_of(config)
    assert builder.run("train", SILENT).encoded_images == 3
    before = snapshot(builder.folder)
    assert builder_of(config).run("train", SILENT).encoded_images == 0
    assert snapshot(builder.folder) == before
    listed = load_split(builder.folder, "train")
    assert listed is not None
    assert [image.key for image in listed.images] == [key_of(file) for file in [*files, files[0]]]
    assert {image.path for image in listed.images} == {f"train.parquet#{n}/0" for n in range(4)}
    assert tower_calls["encode"] == 3


def test_an_unknown_split(cached: Any) -> None:
    with pytest.raises(ConfigError, match="unknown split 'nope'"):
        cached[0].run("nope", SILENT)


def test_another_setting_is_another_folder_and_leaves_the_first(cached: Any) -> None:
    builder, config = cached
    before = snapshot(builder.folder)
    cache = config.cache.model_copy(update={"max_pixels": 64 * 64})
    other = builder_of(config.model_copy(update={"cache": cache}))
    other.run("train", SILENT)
    assert other.folder != builder.folder
    assert snapshot(builder.folder) == before
