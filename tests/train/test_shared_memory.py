"""Shared memory between data-loader workers and training: refused where it is too small, given back early."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache.errors import ResourceError
from cache.features import VisionFeatures
from train import shared_memory, trainer
from train.features import CachedImage
from train.shared_memory import give_back, require_room

from .conftest import Run

MB = 1 << 20


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What is free of the memory that is looked at: a folder of the disk, whose free space hardly changes."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    found = os.statvfs(tmp_path)
    return found.f_bavail * found.f_frsize


def test_what_fits_is_let_through(free: int) -> None:
    require_room([(4, free // 100), (2, free // 100)], processes=2)
    require_room([], processes=8)


def test_what_does_not_fit_is_refused_with_figures(free: int) -> None:
    with pytest.raises(
        ResourceError, match=r"5 steps of up to .* GB of features.*are free\n.*--shm-size.*num_workers: 0"
    ):
        require_room([(4, free // 5), (1, free // 2)], processes=1)


def test_the_processes_of_a_node_share_it(free: int) -> None:
    require_room([(2, free // 8)], processes=1)
    with pytest.raises(ResourceError, match="in each of 8 processes"):
        require_room([(2, free // 8)], processes=8)


def test_training_asks_once_before_it_has_workers(
    run_cached: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(trainer, "require_room", lambda ahead, processes: asked.append(ahead))
    settings = {"eval_split": "val", "dataloader_num_workers": 2, "num_train_epochs": 2}

    run = run_cached("run", effective_batch_size=16, **settings)

    assert max(run.losses()) == 6
    assert [[steps for steps, _ in ahead] for ahead in asked] == [[3, 1]], "never more ahead than there are steps"
    assert all(step_bytes > 0 for _, step_bytes in asked[0])


def test_where_there_is_no_such_folder_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "none")

    require_room([(4, 1 << 60)], processes=1)


def _shared(size: int) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux gives pages back ahead of unmapping")
def test_pages_are_free_before_the_memory_is_unmapped() -> None:
    memory = _shared(64 * MB + 100)
    memory.fill_(7)
    before = _resident()

    give_back(memory)

    assert before - _resident() > 60 * MB
    assert not memory[: 64 * MB].any()


def test_memory_of_ones_own_is_left_alone() -> None:
    memory = torch.full((MB,), 7, dtype=torch.uint8)

    give_back(memory)

    assert bool((memory == 7).all())


def test_a_pinned_image_is_whole_and_its_source_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # pinning needs a GPU
    memory = _shared(4 * MB)
    numbers = memory.view(torch.bfloat16).view(4, -1, 64)
    numbers.copy_(torch.randn(numbers.shape))
    kept = numbers.clone()
    image = CachedImage(VisionFeatures(numbers[0], numbers[1:], torch.tensor((1, 2, 2))), torch.bfloat16)

    pinned = image.pin_memory().features

    assert torch.equal(pinned.image_embeds, kept[0])
    assert torch.equal(pinned.deepstack_features, kept[1:])
    if sys.platform.startswith("linux"):
        assert not numbers.any()


def _resident() -> int:
    """Bytes of shared memory that this process has in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError
