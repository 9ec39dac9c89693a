"""`pipeline verify --against-live`: 0 for an exact cache, the true error for others, and what answers make of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import train.compare
from cache.build import CacheBuilder
from cache.errors import DataError
from cache.features import QuantizedFeatures, VisionFeatures
from cache.formats import FORMATS
from cache.formats.base import checksum
from cache.manifest import save_manifest
from cache.progress import Silent
from cache.quantize import dequantize, quantize
from cache.reader import FeatureCache
from cache.split_files import save_split
from cache.writer import CacheWriter
from pipeline.cli import app
from pipeline.config import PipelineConfig
from tests.train.conftest import job_of
from train.compare import Comparison, compare_with_live
from train.features import CachedSource, features_on
from train.lora import add_lora
from train.model import load_language_model
from train.sample import SampleImage

Cached = Callable[..., PipelineConfig]


@pytest.fixture
def cached(data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path) -> Cached:
    """Caches the sample data with the given cache settings."""

    def make(**cache: Any) -> PipelineConfig:
        config = make_config({"train": str(data_dir / "train.jsonl")}, cache=cache)
        builder_of(config).run("train", Silent())
        return config

    return make


def builder_of(config: PipelineConfig) -> CacheBuilder:
    return CacheBuilder(config.model, config.data, config.cache, config.cache_dir)


def compare(config: PipelineConfig, images: int = 4, records: int = 4, **kwargs: Any) -> Comparison:
    return compare_with_live(job_of(config), "train", images, records, Silent(), **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exact_cache_differs_by_nothing(cached: Cached, dtype: str) -> None:
    result = compare(cached(dtype=dtype))
    assert [level.name for level in result.levels] == ["main", "deepstack.0", "deepstack.1", "deepstack.2"]
    assert all(level.overall == level.worst == 0 for level in result.levels)
    assert len(result.answers) == 4
    for answer in result.answers:
        assert answer.live_loss == answer.cached_loss > 0
        assert answer.turned == 0
        assert answer.divergences
        assert set(answer.divergences) == {0.0}
    shown = result.describe()
    assert shown.startswith(f"cached ({dtype}) against live: 4 images, 4 records\n")
    assert "main           relative error 0, of the worst image 0\n" in shown
    assert "KL divergence  mean 0 nats, largest 0," in shown


@pytest.mark.parametrize("storage", ["float8_e4m3", "int8"])
def test_a_quantised_cache_shows_its_error(cached: Cached, storage: str) -> None:
    exact = FeatureCache(builder_of(cached()).folder)
    result = compare(cached(storage_dtype=storage), images=100, records=4)
    features = [exact.read(key) for key in exact.keys()]  # noqa: SIM118
    assert result.num_images == len(features)
    pairs = [(dequantize(quantize(f, storage), torch.float32), f) for f in features]
    for number, level in enumerate(result.levels):
        one, other = (torch.cat([level_of(pair[side], number) for pair in pairs]).double() for side in (0, 1))
        assert level.overall == pytest.approx(float((one - other).norm() / other.norm()), rel=1e-9)
        worst = max(
            float((a - b).norm() / b.norm()) for a, b in [[level_of(f, number).double() for f in p] for p in pairs]
        )
        assert level.worst == pytest.approx(worst, rel=1e-9)
        assert 0.001 < level.overall < 0.05
    divergences = [value for answer in result.answers for value in answer.divergences]
    assert 0 < max(divergences) < 0.1
    assert any(answer.live_loss != answer.cached_loss for answer in result.answers)
    assert all(abs(answer.live_loss - answer.cached_loss) < 0.1 for answer in result.answers)


def level_of(features: VisionFeatures, number: int) -> torch.Tensor:
    return features.deepstack_features[number - 1] if number else features.image_embeds


def test_features_that_are_not_the_towers_are_found(cached: Cached) -> None:
    config = cached()
    builder = builder_of(config)
    cache = FeatureCache(builder.folder)
    entries = [(key, cache.read(key)) for key in cache.keys()]  # noqa: SIM118
    split = cache.split("train")
    shutil.rmtree(builder.folder)
    save_manifest(builder.folder, builder.manifest)
    with CacheWriter(builder.folder, FORMATS["safetensors"], shard_size=1 << 30) as writer:
        for key, features in entries:
            features.deepstack_features[1] *= 1.25
            writer.add(key, features)
    save_split(builder.folder, split)
    result = compare(config, records=2)
    assert [round(level.overall, 6) for level in result.levels] == [0, 0, 0.25, 0]
    assert sum(sum(answer.divergences) for answer in result.answers) > 0


def test_the_choice_is_seeded(cached: Cached) -> None:
    config = cached(storage_dtype="int8")
    one, again = compare(config, 2, 2), compare(config, 2, 2)
    assert one == again
    config = config.model_copy(update={"train": config.train.model_copy(update={"seed": 7})})
    assert compare(config, 2, 2).levels != one.levels


def test_no_records_needs_no_language_model(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cached()
    monkeypatch.setattr(train.compare, "load_language_model", lambda *_: pytest.fail("the language model was loaded"))
    result = compare(config, images=1, records=0)
    assert (result.num_images, result.answers) == (1, ())
    assert "loss" not in result.describe()


def test_an_image_that_has_changed_is_named(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(data_dir, tmp_path / "data"))
    config = make_config({"train": str(folder / "train.jsonl")})
    builder_of(config).run("train", Silent())
    for file in (folder / "images").iterdir():
        file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DataError, match="has changed since it was cached") as refusal:
        compare(config)
    assert refusal.value.do is not None


def test_a_split_without_images_is_refused(make_config: Callable[..., PipelineConfig], tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"image": [], "question": "What is 1 + 1?", "answer": "2"}) + "\n")
    config = make_config({"train": str(file)})
    builder_of(config).run("train", Silent())
    with pytest.raises(DataError, match="no record of the split has an image"):
        compare(config)


def test_an_adapter_is_put_under_the_language_model(cached: Cached, tmp_path: Path) -> None:
    config = cached(storage_dtype="int8")
    device = torch.device("cpu")
    model = add_lora(load_language_model(config.model, config.train, device), config.train.lora, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    bare, adapted = compare(config, 1, 2), compare(config, 1, 2, adapter=tmp_path / "adapter")
    assert bare.levels == adapted.levels
    assert [a.live_loss for a in bare.answers] != [a.live_loss for a in adapted.answers]


def test_loss_and_divergence_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    live, cached = torch.randn((2, 100, 11), generator=generator, dtype=torch.float32)
    targets = torch.randint(0, 11, (100,), generator=generator)
    weights = torch.rand(100, generator=generator)
    found = train.compare._change(live, cached, targets, weights)
    p, q = live.double().log_softmax(-1), cached.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.divergences == pytest.approx(expected.tolist())
    for loss, logs in ((found.live_loss, p), (found.cached_loss, q)):
        chosen = -logs[range(100), targets]
        assert loss == pytest.approx(float((chosen * weights).sum() / weights.sum()))
    assert found.turned == int((p.argmax(-1) != q.argmax(-1)).sum())


def test_training_moves_8_bits_and_computes_in_the_dtype_asked_for(cached: Cached) -> None:
    cache = FeatureCache(builder_of(cached(storage_dtype="float8_e4m3", dtype="bfloat16")).folder)
    for key in cache.keys():  # noqa: SIM118
        image = CachedSource(cache).load(SampleImage(key, cache.grid(key), ref=None))  # type: ignore[arg-type]
        assert isinstance(image.features, QuantizedFeatures)  # type: ignore[union-attr]
        (features,) = features_on(torch.device("cpu"), [image], None)
        assert features.image_embeds.dtype == torch.bfloat16
        assert checksum(features) == checksum(cache.read(key))


def test_the_verb(cached: Cached, tmp_path: Path) -> None:
    cached(storage_dtype="int8")
    arguments = ["verify", "--config", str(tmp_path / "my.yaml"), "--against-live"]
    sizes = ["--images", "2", "--records", "1"]
    done = CliRunner().invoke(app, [*arguments, "--split", "train", *sizes], catch_exceptions=False)
    assert done.exit_code == 0
    assert "cached (int8) against live: 2 images, 1 records" in done.output
    refused = CliRunner().invoke(app, [*arguments, *sizes])
    assert "needs a split" in str(refused.exception)
