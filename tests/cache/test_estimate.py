"""The estimate of a plan against what is done: bytes that training steps really read, hours at another resolution."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.estimate import Rates
from cache.rates import find_rates
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.survey import Survey, survey_splits
from pipeline.config import PipelineConfig
from train.chat import EncodedText
from train.features import CachedSource
from train.order import Order
from train.sample import Sample, SampleImage
from train.step_dataset import StepDataset

from .conftest import SILENT, builder_of, draw_images, write_rows

QUESTIONS = 3
ONCE = "read_megabytes_per_second_each_image_once_an_epoch"
EACH = "read_megabytes_per_second_each_image_for_each_sample"


def survey(config: PipelineConfig, rates: Rates) -> Survey:
    sections = config.model, config.data, config.cache
    return survey_splits(*sections, target=config.cache_dir, splits=["train"], rates=rates, progress=SILENT)


@pytest.fixture
def config(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> PipelineConfig:
    """Six images of different shapes, each with three questions, cached."""
    images = draw_images(tmp_path / "images", 6)
    rows = write_rows(tmp_path / "train.jsonl", [image for image in images for _ in range(QUESTIONS)])
    made = make_config({"train": str(rows)})
    builder_of(made).run("train", SILENT)
    return made


def bytes_read(config: PipelineConfig, order: Order, batch: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of features that the steps of an epoch read."""
    cache = FeatureCache(builder_of(config).folder)
    text = EncodedText(np.array([7, 99, 8], dtype=np.int32), np.ones(3, dtype=np.float32), ())
    samples = []
    for image in cache.split("train").images:
        shown = SampleImage(image.key, image.image_grid_thw, ImageRef(image.path))
        tokens = len(cache.read(image.key).image_embeds)
        samples += [Sample(text, (shown,), 2 + tokens, 1.0, f"{image.path} {n}") for n in range(QUESTIONS)]
    read: list[int] = []
    load = FeatureCache.read_stored

    def counting(self: FeatureCache, *args: Any, **more: Any) -> Any:
        stored = load(self, *args, **more)
        read.append(stored.image_embeds.nbytes + stored.deepstack_features.nbytes)
        return stored

    monkeypatch.setattr(FeatureCache, "read_stored", counting)
    steps = StepDataset(
        samples,
        CachedSource(cache),
        effective_batch_size=batch,
        tokens_per_pack=4096,
        image_token_id=99,
        merge_size=2,
        seed=5,
        order=order,
    )
    for number in range(len(steps)):
        _ = steps[0, number]
    monkeypatch.undo()
    return sum(read)


def test_the_read_rate_is_what_steps_read(config: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    records, rate = 6 * QUESTIONS, 12.0
    figures = survey(config, Rates(samples_per_second=rate)).figures()["splits"]["train"]
    once, each = (figures[name] * 1e6 * records / rate for name in (ONCE, EACH))
    assert each == pytest.approx(QUESTIONS * once)
    assert bytes_read(config, "image", 2 * QUESTIONS, monkeypatch) == pytest.approx(once)
    assert bytes_read(config, "sample", 1, monkeypatch) == pytest.approx(each)
    cut = bytes_read(config, "image", QUESTIONS + 1, monkeypatch)  # steps end within an image's questions
    assert once < cut < 2 * once
    assert once < bytes_read(config, "sample", 2 * QUESTIONS, monkeypatch) <= each


def test_a_measured_rate_holds_for_tokens(config: PipelineConfig, tmp_path: Path) -> None:
    """Measured at a lower resolution than what is planned."""
    tokens = survey(config, Rates()).splits[0].tokens
    measured = {"images_per_second": 2.0, "encoded_images": 50, "image_tokens": 100, "distinct_images": 50}
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "cache-train.json").write_text(json.dumps(measured))
    rates = find_rates(folder, images_per_second=None, samples_per_second=None)
    assert rates.tokens_per_image == 2
    assert "on images of 2 tokens" in rates.sources["images_per_second"]
    other = config.model_copy(update={"cache": config.cache.model_copy(update={"dir": tmp_path / "elsewhere"})})
    figures = survey(other, rates).figures()["splits"]["train"]
    assert figures["hours_to_cache"] == pytest.approx(tokens / (2.0 * 2) / 3600)
    assert figures["tower_hours_saved_per_epoch_at_most"] == pytest.approx(QUESTIONS * figures["hours_to_cache"])
    assert figures["epochs_until_it_pays_at_best"] == pytest.approx(1 / QUESTIONS)
    given = find_rates(folder, images_per_second=2.0, samples_per_second=None)
    assert survey(other, given).figures()["splits"]["train"]["hours_to_cache"] == pytest.approx(6 / 2.0 / 3600)
