"""The tower alone against the stock full model, and that nothing but its tensors is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.image_utils import load_image

import cache.checkpoint
from cache.checkpoint import SINGLE_FILE
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError, ResourceError
from cache.fingerprint import expected_fingerprint
from cache.preprocess import ImageProcessor, decode
from cache.vision_tower import VisionTower, resolve_device

from .conftest import weight_map

MAX_PIXELS = 128 * 128


def load(checkpoint: Path, **settings: Any) -> VisionTower:
    return VisionTower.load(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(device="cpu", **settings))


def images(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "images").iterdir())


@dataclass
class Reads:
    """What was read of weight files."""

    tensors: list[str]
    files: set[str]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Records every tensor that is read; the library does the reading."""
    found = Reads([], set())

    class Recording:
        def __init__(self, path: Path, **options: Any) -> None:
            found.files.add(Path(path).name)
            self._file = safe_open(path, **options)

        def __enter__(self) -> Recording:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            found.tensors.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(cache.checkpoint, "safe_open", Recording)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["tiny", "tiny_moe"])
def test_equals_the_stock_model_bit_for_bit(
    request: pytest.FixtureRequest, data_dir: Path, family: str, dtype: str
) -> None:
    checkpoint = request.getfixturevalue(family)
    settings = {"dtype": dtype, "max_pixels": MAX_PIXELS}
    tower = load(checkpoint, **settings)
    processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(**settings))
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).model
    stock_processor = AutoImageProcessor.from_pretrained(checkpoint)
    stock_processor.size = {**dict(stock_processor.size), "longest_edge": MAX_PIXELS}
    for file in images(data_dir):
        image = decode(file.read_bytes(), where=file.name, max_image_pixels=10**9)
        (features,) = tower.encode(*([part] for part in processor(image, where=file.name)))
        inputs = stock_processor(images=[load_image(str(file))], return_tensors="pt")
        with torch.no_grad():
            expected = stock.get_image_features(**inputs, return_dict=True)
        assert features.image_embeds.dtype == getattr(torch, dtype)
        assert torch.equal(features.image_embeds, expected.pooler_output[0])
        assert torch.equal(
            features.deepstack_features, torch.stack([level[0] for level in expected.deepstack_features])
        )
        assert torch.equal(features.image_grid_thw, inputs["image_grid_thw"][0])
        assert features.image_embeds.std() > 0.01, "a silent tower would equal anything"


def test_a_batch_is_split_at_the_images(tiny: Path) -> None:
    tower = load(tiny, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    grids = [torch.tensor([1, 4, 6]), torch.tensor([1, 2, 2]), torch.tensor([1, 6, 4])]
    pixels = [torch.randn((int(grid.prod()), 3 * 2 * 16 * 16), generator=generator) for grid in grids]
    together = tower.encode(pixels, grids)
    assert [f.num_tokens for f in together] == [6, 1, 6]
    for features, pixel_values, grid in zip(together, pixels, grids, strict=True):
        (alone,) = tower.encode([pixel_values], [grid])
        torch.testing.assert_close(features.image_embeds, alone.image_embeds)
        torch.testing.assert_close(features.deepstack_features, alone.deepstack_features)
        assert torch.equal(features.image_grid_thw, grid)


def test_is_frozen_and_gives_no_graph(tiny: Path) -> None:
    tower = load(tiny, dtype="float32")
    assert not tower.module.training
    assert not any(p.requires_grad for p in tower.module.parameters())
    (features,) = tower.encode([torch.zeros(4, 1536)], [torch.tensor([1, 2, 2])])
    assert not features.image_embeds.requires_grad
    assert not features.image_embeds.is_inference(), "an inference tensor cannot enter the language model's graph"


def test_too_little_memory_says_what_to_lower(tiny: Path) -> None:
    tower, patches = load(tiny, dtype="bfloat16"), 1 << 40
    with pytest.raises(ResourceError, match=rf"{patches} patches(.|\n)*lower cache\.max_pixels"):
        tower.encode([torch.zeros(1, 1).expand(patches, 1536)], [torch.tensor([1, 1 << 20, 1 << 20])])
    with pytest.raises(RuntimeError) as caught:
        tower.encode([torch.zeros(4, 7)], [torch.tensor([1, 2, 2])])
    assert not isinstance(caught.value, ResourceError), "any other error is not about memory"


@pytest.mark.parametrize("family", ["tiny", "tiny_moe"])
def test_reads_the_tensors_of_the_tower_only(request: pytest.FixtureRequest, reads: Reads, family: str) -> None:
    checkpoint = request.getfixturevalue(family)
    load(checkpoint)
    with safe_open(checkpoint / SINGLE_FILE, framework="pt") as file:
        names = list(file.keys())
    assert sorted(reads.tensors) == [name for name in sorted(names) if name.startswith("model.visual.")]
    assert len(reads.tensors) < len(names)


def test_opens_only_the_files_that_hold_some_of_the_tower(sharded: Path, tiny: Path, reads: Reads) -> None:
    files = weight_map(sharded)
    of_tower = {file for name, file in files.items() if name.startswith("model.visual.")}
    others = set(files.values()) - of_tower
    assert others, "the test needs a file without tower tensors"
    for number, file in enumerate(sorted(others)):
        if number % 2:
            (sharded / file).write_bytes(b"damaged")
        else:
            (sharded / file).unlink()
    tower = load(sharded)
    assert reads.files == of_tower
    for (name, one), (_, other) in zip(
        tower.module.named_parameters(), load(tiny).module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    model, whole = ModelConfig(name_or_path=str(sharded)), ModelConfig(name_or_path=str(tiny))
    assert expected_fingerprint(model, CacheConfig()).name == expected_fingerprint(whole, CacheConfig()).name


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", "mps", "cuda:-1", "", "cuda:x"])
def test_a_device_that_is_not_there(tiny: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="auto"):
        VisionTower.load(ModelConfig(name_or_path=str(tiny)), CacheConfig(device=name))


def test_auto_is_a_device_that_is_there() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash_attn may be installed where there is a GPU")
def test_an_attention_that_is_not_installed(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="attn_implementation"):
        load(tiny, attn_implementation="flash_attention_2")
