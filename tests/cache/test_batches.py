"""Batches of one shape within a patch budget, and a cache built in batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache.batches import batches
from cache.build import CacheBuilder
from cache.config import CacheConfig
from cache.pixels import Pixels
from cache.progress import Silent
from cache.reader import FeatureCache
from pipeline.config import PipelineConfig

GRIDS = [(1, 2, 2), (1, 2, 4), (1, 4, 2)]


@given(shapes=st.lists(st.sampled_from(GRIDS), max_size=20), budget=st.one_of(st.none(), st.integers(1, 40)))
def test_batches_keep_order_shape_and_budget(shapes: list[tuple[int, int, int]], budget: int | None) -> None:
    images = [Pixels(i, torch.zeros(g[1] * g[2], 1), torch.tensor(g)) for i, g in enumerate(shapes)]
    found = list(batches(images, CacheConfig(patches_per_batch=budget)))
    assert [pixels.index for batch in found for pixels in batch] == list(range(len(shapes)))
    for batch in found:
        assert len({tuple(pixels.image_grid_thw.tolist()) for pixels in batch}) == 1
        assert len(batch) == 1 or sum(pixels.num_patches for pixels in batch) <= (budget or 0)


def test_a_cache_built_in_batches_holds_the_same_images(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    caches = []
    for budget in (None, 10_000):
        section = {"dir": str(tmp_path / str(budget)), "patches_per_batch": budget}
        config = make_config({"train": str(data_dir / "train.jsonl")}, cache=section)
        CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
        caches.append(FeatureCache.open(tmp_path / str(budget)))
    alone, together = caches
    assert alone.keys() == together.keys()
    assert alone.folder.name != together.folder.name  # kept apart: last bits may differ
    for key in alone.keys():  # noqa: SIM118
        torch.testing.assert_close(together.read(key).image_embeds, alone.read(key).image_embeds, rtol=1e-4, atol=1e-5)


def test_the_fast_tower_needs_a_gpu(data_dir: Path, make_config: Callable[..., PipelineConfig]) -> None:
    from cache.errors import ConfigError

    config = make_config({"train": str(data_dir / "train.jsonl")}, cache={"tower": "fast", "device": "cpu"})
    with pytest.raises(ConfigError, match=r"cache\.tower: fast needs a GPU"):
        CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
