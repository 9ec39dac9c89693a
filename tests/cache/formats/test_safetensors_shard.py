"""The safetensors format: the common exam, and that the stock library alone reads a shard."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from cache.formats import SafetensorsFormat
from tests.cache.conftest import random_features

from .conftest import KEYS, ShardFormatExam


class TestSafetensors(ShardFormatExam):
    shard_format = SafetensorsFormat()

    def test_the_stock_library_reads_it(self, tmp_path: Path) -> None:
        features = [random_features(n, dtype="bfloat16") for n in range(2)]
        tensors = load_file(self.written(tmp_path, *features))
        names = ("image_embeds", "deepstack_features", "image_grid_thw")
        assert set(tensors) == {f"{key}/{name}" for key in KEYS[:2] for name in names}
        for key, expected in zip(KEYS, features, strict=False):
            for name in names:
                assert torch.equal(tensors[f"{key}/{name}"], getattr(expected, name))
