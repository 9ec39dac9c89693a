"""How much of the rows of mixed real images only fills up blocks; a check that needs a GPU says so without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cache.config import CacheConfig, ModelConfig
from cache.preprocess import ImageProcessor

from ..benchmarks import no_sync, padding  # noqa: TID252  (tests are no package that could be imported by name)


@pytest.mark.parametrize("scale", [1, 4])
def test_padding_stays_below_three_percent(tiny: Path, scale: int) -> None:
    processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(tiny)), CacheConfig())
    grids = padding.grids_of(processor, padding.IMAGES, scale)
    samples = padding.questions_on(grids, 4000, processor.merge_size)
    share = padding.share_of_padding(samples, processor.merge_size, 16, 8192, 100)
    assert 0.001 < share < 0.03


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so where there is no GPU")
def test_the_check_for_waits_shows_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["no_sync"])
    with pytest.raises(SystemExit, match="NO GPU; nothing was shown"):
        no_sync.main()
