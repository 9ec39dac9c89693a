"""Decoding in worker processes: what cannot be used or read comes through, pinned or not."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from cache.config import CacheConfig, ModelConfig
from cache.errors import ReadError
from cache.pixels import load_pixels
from cache.preprocess import ImageProcessor
from cache.records import ImageRef

from .conftest import draw_images


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The data loader pins as where there is a GPU, but for the page-locking; collects what it pins."""
    done: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        done.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return done


def test_pinning_loses_neither_pixels_nor_what_is_wrong(
    tmp_path: Path, tiny: Path, pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CacheConfig(image_processor_backend="pil", num_workers=0)
    processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(tiny)), cache)
    whole, cut, away = draw_images(tmp_path, 3)
    cut.write_bytes(cut.read_bytes()[:200])
    images = [(sha256(file.read_bytes()).hexdigest(), ImageRef(file.name, file)) for file in (whole, cut, away)]
    read = Path.read_bytes

    def fails(file: Path) -> bytes:
        if file == away:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file)

    monkeypatch.setattr(Path, "read_bytes", fails)
    loaded = load_pixels(images, processor, cache)
    first = next(loaded)
    assert (first.index, first.error, first.unreadable) == (0, None, None)
    assert first.content.numel()
    assert len(first.image_grid_thw) == 3
    second = next(loaded)
    assert second.index == 1
    assert second.error is not None
    assert second.error.where == cut.name
    with pytest.raises(ReadError, match=r"0-2\.png: the file cannot be read: "):
        next(loaded)
    assert len(pinned) >= 3, "nothing was pinned: the test says nothing"
