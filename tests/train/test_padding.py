"""How much of the rows of mixed real images only fills up blocks; a check that needs a GPU says so without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.config import CacheConfig, ModelConfig
from cache.preprocess import ImageProcessor

from ..benchmarks import no_sync, padding  # noqa: TID252  (tests are no package that could be imported by name)


@pytest.mark.parametrize(
    ("batch", "budget", "processes", "limit"),
    [(16, 8192, 1, 0.03), (36, 10240, 4, 0.03), (16, 8192, 4, 0.04)],  # the last: four samples a process
)
def test_few_tokens_are_padding(tiny: Path, batch: int, budget: int, processes: int, limit: float) -> None:
    processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(tiny)), CacheConfig())
    grids = padding.grids_of(processor)
    assert max(processor.num_tokens(grid) for grid in grids) == 3600  # a screenshot of 2560 x 1440
    samples = padding.questions_on(grids, 400, processor.merge_size)
    share = padding.share_of_padding(samples, processor.merge_size, batch, budget, 20, processes)
    assert 0.001 < share < limit


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_the_check_for_waits_shows_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["no_sync"])
    with pytest.raises(SystemExit, match="NO GPU; nothing was shown"):
        no_sync.main()
