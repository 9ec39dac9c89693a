"""Reading records leaves the search for cycles as it was, whatever comes of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cache.config import DataConfig
from cache.dataset import read_split
from cache.errors import ConfigError
from cache.many_objects import many_objects


@pytest.fixture(params=[True, False])
def was_on(request: pytest.FixtureRequest) -> Iterator[bool]:
    before, wanted = gc.isenabled(), bool(request.param)
    (gc.enable if wanted else gc.disable)()
    yield wanted
    (gc.enable if before else gc.disable)()


def test_it_is_off_meanwhile_and_as_before_afterwards(was_on: bool) -> None:
    with many_objects():
        assert not gc.isenabled()
        with many_objects():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is was_on


def test_an_error_leaves_it_as_it_was(was_on: bool) -> None:
    with pytest.raises(ConfigError):
        read_split(DataConfig(splits={"train": "nowhere.jsonl"}), "val")
    assert gc.isenabled() is was_on
