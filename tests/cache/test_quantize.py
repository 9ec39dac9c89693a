"""Features in 8 bits: the stated errors hold, and no cache is taken for another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import CacheError, DataError
from cache.features import QUANTIZED_DTYPES, VisionFeatures, stored_features
from cache.find import find_cache
from cache.fingerprint import expected_fingerprint
from cache.formats.base import checksum
from cache.manifest import Manifest
from cache.quantize import dequantize, quantize, to_storage
from cache.reader import FeatureCache
from tests.cache.conftest import SILENT, builder_of, draw_images, random_features, write_rows

STORAGE = list(QUANTIZED_DTYPES)
TINY = torch.finfo(torch.float32).tiny
SLACK = 1 + 1e-6  # of fp32 arithmetic

numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-1e4, 1e4, width=32)


@st.composite
def rows(draw: st.DrawFn, elements: st.SearchStrategy[float]) -> torch.Tensor:
    """(N, D) float32; tokens of very different sizes."""
    width = draw(st.integers(1, 9))
    tokens = draw(st.lists(st.lists(elements, min_size=width, max_size=width), min_size=1, max_size=4))
    return torch.tensor(tokens, dtype=torch.float32)


def features_of(values: torch.Tensor) -> VisionFeatures:
    """The same numbers as main level and as two DeepStack levels in another order."""
    return VisionFeatures(values, torch.stack([values.flip(0), -values]), torch.tensor([1, 2, 2 * len(values)]))


def error_bound(values: torch.Tensor, scales: torch.Tensor, storage: str) -> torch.Tensor:
    """What the documentation states, for each number."""
    if storage == "int8":
        return (scales[:, None] / 2).expand_as(values)
    normal = values.abs() >= scales[:, None] * 2**-6
    return torch.where(normal, values.abs() / 17, scales[:, None] * 2**-10)


@pytest.mark.parametrize("storage", STORAGE)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(values=rows(numbers) | rows(ordinary))
def test_the_error_is_within_the_stated_bound(storage: str, values: torch.Tensor) -> None:
    exact = features_of(values)
    stored = quantize(exact, storage)
    back = dequantize(stored, torch.float32)
    pairs = [(exact.image_embeds, back.image_embeds)]
    pairs += zip(exact.deepstack_features, back.deepstack_features, strict=True)
    for (one, other), scales in zip(pairs, stored.scales, strict=True):
        error = (one.double() - other.double()).abs()
        assert bool((error <= error_bound(one.double(), scales.double(), storage) * SLACK).all())
        assert bool((other.abs() <= one.abs().amax(-1, keepdim=True).clamp_min(448 * TINY)).all()), "never louder"
        assert bool((other[one == 0] == 0).all())
        assert bool((other * one >= 0).all()), "no sign turns"


@pytest.mark.parametrize("storage", STORAGE)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=rows(ordinary))
def test_a_scale_is_absmax_over_the_largest_number(storage: str, values: torch.Tensor) -> None:
    stored = quantize(features_of(values), storage)
    absmax = values.double().abs().amax(-1)
    expected = (absmax / {"float8_e4m3": 448, "int8": 127}[storage]).clamp_min(TINY)
    torch.testing.assert_close(stored.scales[0].double(), expected, rtol=3e-7, atol=0)
    assert torch.equal(stored.scales[1], stored.scales[0].flip(0))


@pytest.mark.parametrize("storage", STORAGE)
def test_the_bounds_are_those_of_docs_as_relative_errors(storage: str) -> None:
    values = torch.linspace(-3, 3, 20001)[None]
    back = dequantize(quantize(features_of(values), storage), torch.float32).image_embeds
    error = (back - values).abs()
    if storage == "int8":
        assert 0.99 < float(error.max() / (3 / 254)) <= SLACK
    else:
        large = values.abs() >= 3 / 448 * 2**-6
        assert 0.99 < float((error / values.abs())[large].max() * 17) <= SLACK


@pytest.mark.parametrize("storage", STORAGE)
def test_an_outlier_costs_its_own_token_only(storage: str) -> None:
    quiet = random_features(0)
    loud = replace(quiet, image_embeds=quiet.image_embeds.clone())
    loud.image_embeds[2, 3] = 1e6
    one, other = (dequantize(quantize(f, storage), torch.float32) for f in (quiet, loud))
    unlike = (one.image_embeds != other.image_embeds).any(-1)
    assert unlike.tolist() == [n == 2 for n in range(6)]
    assert torch.equal(one.deepstack_features, other.deepstack_features)
    assert float(other.image_embeds[2, 3]) == pytest.approx(1e6)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_numbers_and_zeros_of_a_dtype_come_back(storage: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([[largest, -largest, 0.0], [0.0, -0.0, 0.0]], dtype=dtype)
    stored = quantize(features_of(values), storage)
    back = dequantize(stored, dtype)
    assert back.image_embeds.dtype == dtype
    torch.testing.assert_close(back.image_embeds, values, rtol=1e-6, atol=0)
    assert bool(torch.isfinite(back.deepstack_features).all())


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(("name", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_the_product_is_rounded_once(storage: str, name: str, rounding: float) -> None:
    dtype = getattr(torch, name)
    stored = quantize(random_features(1, tokens=200, dtype=name), storage)
    for field in ("image_embeds", "deepstack_features"):
        wide = getattr(dequantize(stored, torch.float32), field)
        assert torch.equal(getattr(dequantize(stored, dtype), field), wide.to(dtype))
        assert bool(((wide.to(dtype).float() - wide).abs() <= wide.abs() * rounding + 1e-7).all())


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused(storage: str, bad: float) -> None:
    for level in ("image_embeds", "deepstack_features"):
        features = random_features(0)
        getattr(features, level).view(-1)[-1] = bad
        with pytest.raises(DataError, match=r"x\.png: a feature is (nan|inf).*\(token 5\)[\s\S]*What to do"):
            quantize(features, storage, where="x.png")


@pytest.mark.parametrize("storage", STORAGE)
def test_nothing_is_changed_and_levels_may_be_missing(storage: str) -> None:
    features = random_features(0, levels=0)
    before = features.image_embeds.clone()
    stored = quantize(features, storage)
    dequantize(stored, torch.float32)
    dequantize(stored, torch.float32)
    assert torch.equal(features.image_embeds, before)
    assert checksum(stored) == checksum(quantize(features, storage))
    assert stored.scales.shape == (1, 6)


def test_bytes_of_the_8b() -> None:
    described: dict[str, Any] = {"hidden_size": 4096, "num_deepstack_levels": 3, "format_version": 1, "format": "x"}
    sizes = {
        name: Manifest(dtype="bfloat16", storage_dtype=name, fingerprint={}, made_by={}, **described).bytes_per_token()
        for name in ("same", *STORAGE)
    }
    assert sizes == {"same": 32768, "float8_e4m3": 16400, "int8": 16400}
    stored = quantize(random_features(0, tokens=5), "int8")
    assert stored.num_bytes == 5 * 4 * (8 + 4)


def test_what_does_not_go_together_is_refused() -> None:
    good = quantize(random_features(0), "int8")
    for change in (
        {"scales": good.scales[:1]},
        {"scales": good.scales.double()},
        {"scales": good.scales.T.contiguous()},
        {"image_embeds": good.image_embeds.float(), "deepstack_features": good.deepstack_features.float()},
        {"deepstack_features": good.deepstack_features.to(torch.float8_e4m3fn)},
    ):
        with pytest.raises(ValueError, match=r"not|is "):
            stored_features(good.tensors() | change)


@pytest.fixture
def made(tmp_path: Path, make_config: Any) -> Any:
    """Caches the same four images into one folder with a storage dtype and a format."""
    split = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 4))

    def make(storage: str, **cache: Any) -> Any:
        config = make_config({"train": str(split)}, cache={"storage_dtype": storage, **cache})
        builder = builder_of(config)
        return builder, config, builder.run("train", SILENT)

    return make


@pytest.mark.parametrize("storage", STORAGE)
def test_exact_and_quantised_caches_lie_side_by_side(made: Any, storage: str) -> None:
    exact, _, whole = made("same")
    with pytest.raises(CacheError, match=rf"storage_dtype: 'same' in the cache, '{storage}' asked for"):
        open_cache(made_config(made, storage))
    quantised, config, summary = made(storage)
    assert quantised.folder != exact.folder
    assert quantised.folder.parent == exact.folder.parent
    assert quantised.fingerprint == exact.fingerprint.with_storage(storage)
    assert exact.fingerprint == quantised.fingerprint.with_storage("same")
    assert summary.image_tokens == whole.image_tokens
    one, other = FeatureCache(exact.folder), open_cache(config)
    assert other.files.where == str(quantised.folder)
    assert one.keys() == other.keys()
    for key in one.keys():  # noqa: SIM118
        stored = other.read_stored(key)
        assert checksum(stored) == checksum(quantize(one.read(key), storage))
        assert checksum(other.read(key)) == checksum(dequantize(stored, torch.float32))
    tokens = sum(one.read(key).num_tokens for key in one.keys())  # noqa: SIM118
    assert sum(other.read_stored(key).num_bytes for key in other.keys()) == tokens * other.manifest.bytes_per_token()  # noqa: SIM118


def made_config(made: Any, storage: str) -> Any:
    """A configuration that is never cached."""
    _, config, _ = made("same")
    return config.model_copy(update={"cache": config.cache.model_copy(update={"storage_dtype": storage})})


def open_cache(config: Any) -> FeatureCache:
    return find_cache(config.cache_dir, expected_fingerprint(config.model, config.cache), any_backend=False)


def test_a_flipped_bit_in_the_scales_is_found(made: Any) -> None:
    builder, _, _ = made("int8")
    (shard,) = (builder.folder / "shards").glob("*.safetensors")
    cache = FeatureCache(builder.folder)
    key = cache.keys()[0]
    scales = cache.read_stored(key).scales.numpy().tobytes()
    content = bytearray(shard.read_bytes())
    content[content.index(scales)] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CacheError, match="checksum"):
        FeatureCache(builder.folder).read(key)


def test_a_manifest_that_states_another_storage_is_refused(made: Any) -> None:
    builder, _, _ = made("int8")
    file = builder.folder / "manifest.json"
    content = json.loads(file.read_text())
    del content["digest"]
    for storage in ("same", "float8_e4m3"):
        file.write_text(json.dumps(content | {"storage_dtype": storage}))
        cache = FeatureCache(builder.folder)
        with pytest.raises(CacheError, match="shape or dtype"):
            cache.read(cache.keys()[0])


def test_one_storage_dtype_becomes_another() -> None:
    exact = random_features(0, dtype="bfloat16")
    assert to_storage(exact, "same", "bfloat16") is exact
    eight = to_storage(exact, "int8", "bfloat16")
    assert checksum(eight) == checksum(quantize(exact, "int8"))
    assert checksum(to_storage(eight, "same", "bfloat16")) == checksum(dequantize(eight, torch.bfloat16))  # type: ignore[arg-type]
    other = to_storage(eight, "float8_e4m3", "bfloat16")
    assert other.image_embeds.dtype == torch.float8_e4m3fn
