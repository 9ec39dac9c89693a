"""Features that are not finite end the run with the image and the level named; they are never stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.build import CacheBuilder
from cache.checkpoint import SINGLE_FILE
from cache.config import CacheConfig
from cache.copy_back import CopyBack
from cache.errors import DataError
from cache.features import VisionFeatures
from cache.formats import FORMATS
from cache.reader import FeatureCache
from cache.split_images import SplitImage
from cache.verify import verify_cache
from cache.vision_tower import VisionTower
from cache.waits import TOWER, Waits
from cache.writer import CacheWriter
from pipeline.config import PipelineConfig

from .conftest import SILENT, assert_same_entries, builder_of, committed_keys, draw_images, random_features, write_rows

MakeConfig = Callable[..., PipelineConfig]


def spoil_weights(checkpoint: Path, name: str, value: float) -> None:
    """One number of one tensor of the tower."""
    weights = load_file(checkpoint / SINGLE_FILE)
    (full,) = [key for key in weights if key.endswith(name)]
    weights[full].view(-1)[0] = value
    save_file(weights, checkpoint / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize("storage", ["same", "int8", "float8_e4m3"])
@pytest.mark.parametrize(
    ("tensor", "level"), [("visual.merger.linear_fc2.bias", "main"), ("merger_list.1.linear_fc2.bias", r"deepstack\.1")]
)
def test_weights_that_are_not_finite_are_noticed_at_the_first_image(
    tmp_path: Path, checkpoint: Path, make_config: MakeConfig, storage: str, tensor: str, level: str
) -> None:
    spoil_weights(checkpoint, tensor, float("nan"))
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 2))
    config = make_config({"train": str(rows)}, model=str(checkpoint), cache={"storage_dtype": storage})
    builder = builder_of(config)
    with pytest.raises(DataError, match=rf"images/0-\d\.png: .*not finite.*level {level}\b") as caught:
        builder.run("train", SILENT)
    assert "another GPU" in str(caught.value.do)
    assert committed_keys(builder.folder) == []


def test_an_overflow_in_float16_says_which_dtypes_hold_more(
    tmp_path: Path, checkpoint: Path, make_config: MakeConfig
) -> None:
    spoil_weights(checkpoint, "visual.merger.linear_fc2.bias", 1e5)
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 1))
    config = make_config({"train": str(rows)}, model=str(checkpoint), cache={"dtype": "float16"})
    with pytest.raises(DataError, match="level main") as caught:
        builder_of(config).run("train", SILENT)
    assert "cache.dtype: bfloat16 or float32" in str(caught.value.do)
    wide = builder_of(make_config({"train": str(rows)}, model=str(checkpoint)))
    assert wide.run("train", SILENT).encoded_images == 1


class BrokenDevice:
    """The real tower, but for one number of one image."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, image: int) -> None:
        encode, self.image, self.encoded = VisionTower.encode, image, 0

        def broken(tower: VisionTower, pixels: Any, grids: Any) -> list[VisionFeatures]:
            found = encode(tower, pixels, grids)
            for number, one in enumerate(found):
                if self.encoded == self.image:
                    deepstack = one.deepstack_features.clone()
                    deepstack[-1, -1, -1] = -float("inf")
                    found[number] = dataclasses.replace(one, deepstack_features=deepstack)
                self.encoded += 1
            return found

        monkeypatch.setattr(VisionTower, "encode", broken)


@pytest.mark.parametrize(("patches_per_batch", "storage_dtype"), [(None, "same"), (4096, "same"), (4096, "int8")])
def test_what_was_encoded_before_is_kept_and_a_good_device_goes_on(
    tmp_path: Path,
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    patches_per_batch: int | None,
    storage_dtype: str,
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 6))
    cache = {"patches_per_batch": patches_per_batch, "storage_dtype": storage_dtype}
    config = make_config({"train": str(rows)}, cache=cache)

    def builder(folder: str) -> CacheBuilder:
        cache = config.cache.model_copy(update={"dir": tmp_path / folder})
        return builder_of(config.model_copy(update={"cache": cache}))

    with monkeypatch.context() as patch:
        BrokenDevice(patch, image=3)
        with pytest.raises(DataError, match="not finite"):
            builder("broken").run("train", SILENT)
    kept = committed_keys(builder("broken").folder)
    assert len(kept) == 3
    verify_cache(builder("broken").folder, SILENT, split=None)
    cache = FeatureCache(builder("broken").folder)
    assert all(torch.isfinite(cache.read(key).deepstack_features).all() for key in kept)
    assert builder("broken").run("train", SILENT).encoded_images == 3
    builder("whole").run("train", SILENT)
    assert_same_entries(builder("broken").folder, builder("whole").folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_place_and_every_such_number_counts(tmp_path: Path, dtype: Any, value: float) -> None:
    (tmp_path / "shards").mkdir()
    listed = SplitImage("a.png", "0" * 64, (1, 2, 12), 1, 1)
    places = [("image_embeds", 0, "main"), ("image_embeds", 47, "main"), ("deepstack_features", 0, "deepstack.0")]
    places += [("deepstack_features", 143, "deepstack.2")]
    for name, place, level in places:
        features = random_features(0, dtype=dtype)
        getattr(features, name).view(-1)[place] = value
        with (
            pytest.raises(DataError, match=f"level {level}"),
            CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=1 << 20) as writer,
            CopyBack(writer, CacheConfig(dtype=dtype), Waits(TOWER)) as results,
        ):
            results.add([listed], [features])
    assert committed_keys(tmp_path) == []


def test_the_largest_numbers_of_a_dtype_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    features = random_features(0, dtype="float16", levels=0)
    features.image_embeds.fill_(torch.finfo(torch.float16).max)
    listed = SplitImage("a.png", "0" * 64, (1, 2, 12), 1, 1)
    with (
        CacheWriter(tmp_path, FORMATS["safetensors"], shard_size=1 << 20) as writer,
        CopyBack(writer, CacheConfig(dtype="float16"), Waits(TOWER)) as results,
    ):
        results.add([listed], [features])
    assert committed_keys(tmp_path) == ["0" * 64]
