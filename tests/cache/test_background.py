"""Work in a thread: in order, bounded, and an error reaches the caller once."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from cache.background import HANDOVER, Stage, quick_handovers


def test_everything_is_done_in_order() -> None:
    done: list[int] = []
    stage = Stage[int]("test", done.append, limit=3)
    for number in range(100):
        stage.put(number)
    stage.drain()
    assert done == list(range(100))
    stage.put(100)
    stage.close()
    assert done[-1] == 100


@pytest.mark.parametrize(("limit", "weights", "most"), [(3, [1] * 20, 3), (10, [4] * 20, 8), (10, [50] * 5, 50)])
def test_no_more_than_the_limit_is_unfinished(limit: int, weights: list[int], most: int) -> None:
    unfinished, seen = 0, []
    lock = threading.Lock()

    def work(weight: int) -> None:
        nonlocal unfinished
        time.sleep(0.002)
        with lock:
            unfinished -= weight

    stage = Stage[int]("test", work, limit=limit)
    for weight in weights:
        with lock:
            unfinished += weight  # the caller holds it while it waits
        stage.put(weight, weight)
        seen.append(unfinished)
    stage.close()
    assert most <= max(seen) <= most + max(weights), "the one that is being handed over, and what may be unfinished"


def test_an_error_is_raised_once_and_ends_the_work() -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 2:
            raise ZeroDivisionError
        done.append(number)

    stage = Stage[int]("test", work, limit=100)

    def hand_over() -> None:
        for number in range(10):
            stage.put(number)
        stage.drain()

    with pytest.raises(ZeroDivisionError):
        hand_over()
    stage.put(11)
    stage.drain()
    stage.close()
    assert done == [0, 1]


def test_an_error_does_not_leave_the_caller_waiting() -> None:
    def work(_number: int) -> None:
        time.sleep(0.01)
        raise ZeroDivisionError

    stage = Stage[int]("test", work, limit=1)
    stage.put(0)
    with pytest.raises(ZeroDivisionError):
        stage.put(1)
    stage.close()


@pytest.mark.timeout(30)
def test_a_thread_that_cannot_be_started_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stage = Stage[int]("test", lambda _: None, limit=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            stage.put(1)
    stage.drain()
    stage.close()


def test_the_thread_ends_and_none_is_started_for_nothing() -> None:
    before = threading.active_count()
    Stage[int]("test", lambda _: None, limit=1).close()
    stage = Stage[int]("test", lambda _: None, limit=1)
    stage.put(1)
    stage.close()
    assert threading.active_count() == before


def test_handovers_are_quick_for_as_long_as_it_is_asked() -> None:
    before = sys.getswitchinterval()

    def fail() -> None:
        with quick_handovers():
            assert sys.getswitchinterval() == pytest.approx(HANDOVER)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sys.getswitchinterval() == before
