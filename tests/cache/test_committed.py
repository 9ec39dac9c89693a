"""What is cached already costs neither space nor time any more, whatever it is called; nothing else is counted."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.checkpoint import VisionWeights
from cache.errors import CacheError
from cache.estimate import Rates
from cache.records import ImageRef
from cache.survey import Survey, survey_splits
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, draw_images, write_rows

MakeConfig = Callable[..., PipelineConfig]


def survey(config: PipelineConfig, *splits: str) -> Survey:
    return survey_splits(
        config.model,
        config.data,
        config.cache,
        target=config.cache_dir,
        splits=splits or ("train", "val"),
        rates=Rates(images_per_second=0.5, sources={"images_per_second": "0.5, given"}),
        progress=SILENT,
    )


@pytest.fixture
def half(tmp_path: Path, make_config: MakeConfig) -> PipelineConfig:
    """train: images 0 to 3, cached; val: images 2 to 5, 2 under the same name, 3 under another one, 4 and 5 new."""
    images = draw_images(tmp_path / "images", 6)
    for file in images:
        os.utime(file, (1e9, 1e9))  # the time of a file that was only just written is not relied on
    other_name = Path(shutil.copy(images[3], tmp_path / "images" / "other.png"))
    train = write_rows(tmp_path / "train.jsonl", images[:4])
    val = write_rows(tmp_path / "val.jsonl", [images[2], other_name, images[4], images[5]])
    config = make_config({"train": str(train), "val": str(val)})
    builder_of(config).run("train", SILENT)
    return config


def test_what_is_cached_needs_no_space_and_no_time(half: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = survey(half)
    train, val, together = (found.figures()["splits"][name] for name in ("train", "val", "together"))
    assert [one["cached_images"] for one in (train, val, together)] == [4, 2, 4]
    assert [one["distinct_images"] for one in (train, val, together)] == [4, 4, 6]
    to_do = builder_of(half).plan("val", SILENT)
    assert found.figures()["needed_bytes"] == to_do.missing_bytes == val["missing_bytes"] == together["missing_bytes"]
    assert train["missing_bytes"] == 0
    assert train["hours_to_cache"] == 0
    assert val["hours_to_cache"] == pytest.approx(2 / 0.5 / 3600)
    assert train["tower_hours_saved_per_epoch_at_least"] == pytest.approx(4 / 0.5 / 3600)
    monkeypatch.setattr("cache.survey.free_bytes", lambda _: to_do.missing_bytes)
    text = survey(half).describe()
    assert "NOT ENOUGH SPACE" not in text
    assert "cached already   2 images" in text
    monkeypatch.setattr("cache.survey.free_bytes", lambda _: to_do.missing_bytes - 1)
    assert "NOT ENOUGH SPACE" in survey(half).describe()
    builder_of(half).run("val", SILENT)
    monkeypatch.setattr("cache.survey.free_bytes", lambda _: 0)
    assert "NOT ENOUGH SPACE" not in survey(half).describe()


def test_only_files_that_may_be_cached_under_another_name_are_read(
    half: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    whole = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: read.append(Path(self.path).name) or whole(self))
    assert survey(half, "train").splits[0].committed
    assert read == []
    assert len(survey(half, "val").splits[0].committed) == 2
    sizes = {file.stat().st_size for file in (tmp_path / "images").glob("0-[0-3].png")}
    new = {name for name in ("0-4.png", "0-5.png") if (tmp_path / "images" / name).stat().st_size in sizes}
    assert set(read) - new == {"0-2.png", "other.png"}, "val has no list of its own yet"


def test_a_changed_file_is_not_cached_though_its_name_is(half: PipelineConfig, tmp_path: Path) -> None:
    (changed,) = draw_images(tmp_path / "new", 1, seed=7)
    changed.replace(tmp_path / "images" / "0-0.png")
    assert len(survey(half, "train").splits[0].committed) == 3


@pytest.mark.parametrize("change", [{"max_pixels": 64 * 64}, {"format": "hdf5"}, {"storage_dtype": "int8"}])
def test_what_was_made_otherwise_does_not_count(
    half: PipelineConfig, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = half.model_copy(update={"cache": half.cache.model_copy(update=change)})
    monkeypatch.setattr(VisionWeights, "find", None)  # no weight is read where that is known without
    assert not survey(other).splits[0].committed


def test_other_weights_make_other_features(
    half: PipelineConfig, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = half.model_copy(update={"model": half.model.model_copy(update={"name_or_path": str(checkpoint)})})
    assert len(survey(same, "train").splits[0].committed) == 4
    find = VisionWeights.find

    def without_one(model: Any) -> VisionWeights:
        weights = find(model)
        return dataclasses.replace(weights, files=dict(list(weights.files.items())[1:]))

    monkeypatch.setattr(VisionWeights, "find", without_one)
    assert not survey(same, "train").splits[0].committed


def test_an_entry_counts_and_not_its_name_in_a_list(half: PipelineConfig) -> None:
    """A run that was stopped has listed everything and committed some."""
    folder = builder_of(half).folder
    for file in (folder / "shards").iterdir():
        file.unlink()
    assert not survey(half).splits[0].committed


def test_a_damaged_index_is_told_as_caching_would(half: PipelineConfig) -> None:
    folder = builder_of(half).folder
    (folder / "entries.index").unlink()
    (index,) = (folder / "shards").glob("*.json")
    index.write_text(json.dumps({"shard": "x"}))
    with pytest.raises(CacheError, match="--repair"):
        survey(half)
