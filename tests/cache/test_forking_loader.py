"""What the parent of worker processes has thrown away is not freed in them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from cache.forking_loader import ForkingLoader
from tests.owned import Owned


class _Collecting(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.fixture
def without_collecting() -> Iterator[None]:
    """The parent's garbage stays until it is asked for."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("kind", "freed"), [(ForkingLoader, False), (DataLoader, True)])
def test_garbage_of_the_parent_is_not_freed_in_workers(
    kind: type[DataLoader[int]], freed: bool, without_collecting: None, tmp_path: Path
) -> None:
    for place in ("thrown away before", "in use"):
        loader: DataLoader[int] = kind(_Collecting(), batch_size=None, num_workers=2)
        held = Owned(tmp_path / "told")
        if place == "thrown away before":
            del held
        assert sorted(loader) == [0, 1, 2, 3]
    assert (tmp_path / "told").exists() is freed
    assert gc.get_freeze_count() == 0


def test_what_is_alive_while_workers_start_is_not_theirs_to_free(without_collecting: None, tmp_path: Path) -> None:
    """Frozen, it is not looked at in a worker even if the parent's reference is gone there."""
    loader = ForkingLoader(_Collecting(), batch_size=None, num_workers=1, worker_init_fn=_forget)
    _kept.append(Owned(tmp_path / "told"))
    assert list(loader) == [0, 1, 2, 3]
    assert not (tmp_path / "told").exists()
    _kept.clear()


_kept: list[Owned] = []


def _forget(_worker: int) -> None:
    _kept.clear()
