"""Patches of bytes and a table give what the stock processor gives, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.utils import is_torchvision_available

from cache.config import CacheConfig, ModelConfig
from cache.patches import Normalizer, cut
from cache.preprocess import ImageProcessor, decode

from .conftest import draw_images

BACKENDS = [
    "pil",
    pytest.param(
        "torchvision", marks=pytest.mark.skipif(not is_torchvision_available(), reason="torchvision is not installed")
    ),
]


def processor_of(tiny: Path, backend: str, **changes: Any) -> ImageProcessor:
    made = ImageProcessor.from_checkpoint(
        ModelConfig(name_or_path=str(tiny)), CacheConfig.model_validate({"image_processor_backend": backend})
    )
    for name, value in changes.items():
        setattr(made._processor, name, value)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
    ],
    ids=["Qwen3-VL", "a mean for each channel", "not normalized", "bytes"],
)
def test_equals_the_stock_processor_bit_for_bit(
    tiny: Path, data_dir: Path, tmp_path: Path, backend: str, changes: dict[str, Any]
) -> None:
    processor = processor_of(tiny, backend, **changes)
    normalize = Normalizer(processor, torch.device("cpu"))
    files = [*sorted((data_dir / "images").iterdir()), *draw_images(tmp_path / "images", 3)]
    for file in files:
        image = decode(file.read_bytes(), where=file.name, max_image_pixels=10**9)
        expected, expected_grid = processor(image, where=file.name)
        patches, grid = cut(processor, image, where=file.name)
        assert patches.dtype == torch.uint8
        assert patches.numel() * processor.temporal_patch_size == expected.numel()
        assert torch.equal(normalize(patches), expected.float())
        assert torch.equal(grid, expected_grid)


def test_every_byte_has_its_number(tiny: Path) -> None:
    processor = processor_of(tiny, "pil")
    ramp = torch.arange(256, dtype=torch.uint8).repeat(16).view(64, 64, 1).expand(-1, -1, 3)
    image = Image.fromarray(ramp.numpy().copy())
    patches, _ = cut(processor, image, where="ramp")
    assert len(patches.unique()) == 256
    found = Normalizer(processor, torch.device("cpu"))(patches)
    assert torch.equal(found, processor(image, where="ramp")[0])
