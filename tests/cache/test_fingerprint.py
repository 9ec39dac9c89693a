"""A cache made by something else is refused, and what differs is shown field by field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.config import ModelConfig
from cache.errors import CacheError
from cache.find import find_cache
from cache.fingerprint import Fingerprint, expected_fingerprint
from pipeline.config import PipelineConfig


def expected(config: PipelineConfig, **cache: Any) -> Fingerprint:
    return expected_fingerprint(config.model, config.cache.model_copy(update=cache))


def find(config: PipelineConfig, wanted: Fingerprint, *, any_backend: bool = False) -> Any:
    return find_cache(config.cache_dir, wanted, any_backend=any_backend)


def test_finds_what_the_same_settings_made(cached: Any) -> None:
    builder, config = cached
    assert expected(config).name == builder.fingerprint.name
    assert find(config, expected(config)).folder == builder.folder
    free = {"shard_size": 7, "num_workers": 9, "device": "cuda:3", "max_image_pixels": 99, "verify_checksums": False}
    assert find(config, expected(config, **free)).folder == builder.folder, "these change no number"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"max_pixels": 4096}, "processor.max_pixels: 16384 in the cache, 4096 asked for"),
        ({"min_pixels": 1024}, "processor.min_pixels: .* in the cache, 1024 asked for"),
        ({"dtype": "bfloat16"}, "dtype: 'float32' in the cache, 'bfloat16' asked for"),
        ({"attn_implementation": "eager"}, "attn_implementation: 'sdpa' in the cache, 'eager' asked for"),
    ],
)
def test_another_setting_is_shown(cached: Any, change: dict[str, Any], line: str) -> None:
    builder, config = cached
    with pytest.raises(CacheError, match=line) as caught:
        find(config, expected(config, **change))
    assert builder.folder.name in str(caught.value)
    assert str(caught.value).count("in the cache") == 1, "what is equal is not shown"
    assert caught.value.exit_code == 4


def test_other_weights_are_shown(cached: Any, tmp_path: Path, tiny: Path) -> None:
    _, config = cached
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.visual.blocks.0.norm1.bias"] += 1e-3
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(CacheError, match="vision_weights: ") as caught:
        find(config, expected_fingerprint(ModelConfig(name_or_path=str(other)), config.cache))
    assert str(caught.value).count("in the cache") == 1


def test_a_copy_of_the_model_and_other_text_weights_are_the_same_features(
    cached: Any, tmp_path: Path, tiny: Path
) -> None:
    builder, config = cached
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, other / "model.safetensors")
    wanted = expected_fingerprint(ModelConfig(name_or_path=str(other)), config.cache)
    assert find(config, wanted).folder == builder.folder


def test_another_tower_of_the_same_weights_is_shown(cached: Any, tmp_path: Path, tiny: Path) -> None:
    _, config = cached
    other = Path(shutil.copytree(tiny, tmp_path / "other"))
    settings = json.loads((other / "config.json").read_text())
    settings["vision_config"]["deepstack_visual_indexes"] = [0, 1, 3]
    (other / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CacheError, match=r"deepstack_visual_indexes: \[0, 1, 2\] in the cache, \[0, 1, 3\]"):
        find(config, expected_fingerprint(ModelConfig(name_or_path=str(other)), config.cache))


def of_version(builder: Any, version: int, name: str) -> Path:
    """A copy of the cache that states another format version."""
    folder = Path(shutil.copytree(builder.folder, builder.folder.parent / name))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"format_version": version, "future": True}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_another_format_version_does_not_hide_the_one_that_fits(cached: Any) -> None:
    builder, config = cached
    of_version(builder, 2, "0-first")
    (builder.folder.parent / "1-damaged").mkdir()
    (builder.folder.parent / "1-damaged" / "manifest.json").write_text("{")
    assert find(config, expected(config)).folder == builder.folder
    with pytest.raises(CacheError, match="'float32' in the cache, 'bfloat16' asked for"):
        find(config, expected(config, dtype="bfloat16"))
    shutil.rmtree(builder.folder)
    with pytest.raises(CacheError, match="has format version 2; this program reads version 1"):
        find(config, expected(config))


def test_the_nearest_of_several_is_shown(cached: Any) -> None:
    builder, config = cached
    far = Fingerprint({**builder.fingerprint.fields, "dtype": "float16", "processor.max_pixels": 1})
    folder = Path(shutil.copytree(builder.folder, builder.folder.parent / "0-far"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": far.fields}))
    with pytest.raises(CacheError, match=f"nearest, {builder.folder.name}, differs"):
        find(config, expected(config, max_pixels=4096))


def test_no_cache_at_all(cached: Any, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="there is no cache here"):
        find_cache(tmp_path / "nowhere", expected(cached[1]), any_backend=True)


def test_auto_reads_what_either_backend_made(cached: Any) -> None:
    builder, config = cached
    other = Fingerprint({**builder.fingerprint.fields, "processor.backend": "other"})
    with pytest.raises(CacheError, match=r"processor\.backend: .* 'other' asked for"):
        find(config, other)
    assert find(config, other, any_backend=True).folder == builder.folder
    folder = Path(shutil.copytree(builder.folder, builder.folder.parent / other.name))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": other.fields}))
    assert find(config, other).folder == folder
    with pytest.raises(CacheError, match="two image processor backends"):
        find(config, other, any_backend=True)


def test_the_name_depends_on_every_field_and_on_no_order() -> None:
    fields = {"a": 1, "b": [1, 2], "c": None}
    assert Fingerprint(fields).name == Fingerprint(dict(reversed(fields.items()))).name
    names = {Fingerprint(f).name for f in (fields, {**fields, "a": 2}, {**fields, "b": [2, 1]}, {"a": 1, "b": [1, 2]})}
    assert len(names) == 4
