"""The tower on a GPU that is not the current one, as with `cache.device: cuda:1`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache import flash
from cache.config import CacheConfig
from cache.copy_back import CopyBack
from cache.features import VisionFeatures
from cache.formats import SafetensorsFormat
from cache.split_images import SplitImage
from cache.waits import TOWER, Waits
from cache.writer import CacheWriter

from .conftest import assert_same

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
CYCLES = 1 << 30  # about half a second


def late(device: torch.device, value: float) -> torch.Tensor:
    """(1 << 16, 8) numbers that the device has no sooner than after CYCLES; zero until then."""
    numbers = torch.zeros((1 << 16, 8), device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(CYCLES)
    return numbers.fill_(value)


def test_features_are_copied_back_when_they_are_there(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    device, grid = torch.device("cuda:1"), torch.tensor([1, 2, 2 << 16])
    image = SplitImage("a.png", f"{7:064x}", (1, 2, 2 << 16), 1, 1)
    assert torch.cuda.current_device() == 0
    with (
        CacheWriter(tmp_path, SafetensorsFormat(), shard_size=1 << 30) as writer,
        CopyBack(writer, CacheConfig(dtype="float32"), Waits(TOWER)) as results,
    ):
        numbers = late(device, 3.0)
        results.add([image], [VisionFeatures(numbers, numbers[None], grid)])
    (shard,) = (tmp_path / "shards").glob("*.safetensors")
    stored = SafetensorsFormat().open(shard).read(image.key)
    three = torch.full((1 << 16, 8), 3.0)
    assert_same(
        VisionFeatures(stored.image_embeds, stored.deepstack_features, grid), VisionFeatures(three, three[None], grid)
    )


@pytest.mark.filterwarnings("ignore:cutlass:DeprecationWarning")  # flash-attn-4's own imports
@pytest.mark.skipif(not flash.is_installed(), reason="needs flash-attn-4")
def test_flash_attention_waits_for_what_it_reads() -> None:
    device = torch.device("cuda:1")
    query = torch.randn((1, 256, 2, 64), device=device, dtype=torch.bfloat16)
    expected = flash.flash_attention(query, query, query)  # compiles the kernel
    torch.cuda.synchronize(device)
    there = torch.zeros_like(query)
    assert torch.cuda.current_device() == 0
    late(device, 0.0)
    there.copy_(query)
    assert flash.flash_attention(there, there, there).equal(expected)
