"""The demo's task is learned from cached features, and only because the features are the right image's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import train.inputs
from cache.reader import FeatureCache
from cache.split_files import load_split
from pipeline.cli import app
from pipeline.demo.run import demo_config, run_demo
from pipeline.demo.screenshots import make_screenshots
from pipeline.demo.tiny_model import make_tiny_checkpoint
from pipeline.exit import exit_code_of
from train.features import CachedSource, StepImage
from train.sample import SampleImage

CHANCE = 0.25  # without looking at the image: every question has four answers


class _PermutedSource(CachedSource):
    """Gives each training image the features of another one of the same shape; leaves other splits alone."""

    def __init__(self, cache: FeatureCache) -> None:
        super().__init__(cache)
        images = load_split(cache.folder, "train")
        assert images is not None
        by_grid: dict[Any, list[str]] = {}
        for image in images.images:
            by_grid.setdefault(image.image_grid_thw, []).append(image.key)
        self._other: dict[str, str] = {}
        for keys in by_grid.values():
            shuffled = random.Random(0).sample(keys, len(keys))
            self._other |= dict(zip(keys, shuffled, strict=True))

    def load(self, image: SampleImage) -> StepImage:
        other = self._other.get(image.key, image.key)
        return super().load(SampleImage(other, image.grid, image.ref))


def _run(*arguments: str) -> None:
    assert exit_code_of(lambda: app(list(arguments), standalone_mode=False)) == 0


def _accuracy(folder: Path) -> float:
    config = folder / "demo.yaml"
    _run("train", "--config", str(config), "--from-cache")
    _run("eval", "--config", str(config), "--split", "val")
    return float(json.loads((folder / "run" / "eval-val" / "metrics.json").read_text())["exact_match"])


@pytest.fixture
def cached_demo(tmp_path: Path) -> Path:
    make_tiny_checkpoint(tmp_path / "model")
    make_screenshots(tmp_path / "data")
    config = demo_config(tmp_path)
    config["train"] |= {"eval_split": None, "logging_steps": 50, "report_to": ["none"]}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(config))
    for split in ("train", "val"):
        _run("cache", "--config", str(tmp_path / "demo.yaml"), "--split", split)
    return tmp_path


@pytest.mark.timeout(900)
def test_demo_reaches_its_accuracy_and_writes_its_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`make demo` whole: at least 95 % on val images that were never trained on."""
    run_demo(tmp_path)
    printed = capfd.readouterr().out
    scores = json.loads((tmp_path / "run" / "eval-val" / "metrics.json").read_text())
    print(f"exact match on unseen images: {scores['exact_match']:.3f} (chance {CHANCE})")
    assert scores["exact_match"] >= 0.95
    for verb in ("cache", "train", "eval", "predict"):
        assert f"$ pipeline {verb} " in printed
    assert "val exact match, before" in printed
    assert str(tmp_path / "report.html") in printed
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/") >= 8


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_features_of_another_image_teach_nothing(cached_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.inputs, "CachedSource", _PermutedSource)
    accuracy = _accuracy(cached_demo)
    print(f"trained on permuted features: {accuracy:.3f} (chance {CHANCE})")
    assert accuracy <= CHANCE + 0.1
