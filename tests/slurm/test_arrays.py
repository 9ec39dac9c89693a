"""SLURM's notation of arrays against a plain set of numbers, and as the running SLURM itself writes it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.arrays import one_by_one, parse_name, parse_tasks, render_name, render_tasks
from slurm.client import SlurmClient

from .cluster import Cluster

_TASKS = st.frozensets(st.integers(0, 60), min_size=1)
_PIECES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=6)


@given(_TASKS, st.none() | st.integers(1, 9))
def test_tasks_are_read_back(tasks: frozenset[int], max_running: int | None) -> None:
    text = render_tasks(tasks, max_running)

    assert parse_tasks(text) == tasks
    assert text.endswith(f"%{max_running}") == (max_running is not None)
    # The shortest form: no two pieces could be one.
    ends = [piece.split("-") for piece in text.partition("%")[0].split(",")]
    assert all(int(after[0]) > int(before[-1]) + 1 for before, after in pairwise(ends))


@given(_PIECES)
def test_pieces_in_any_order_and_with_steps_are_understood(pieces: list[tuple[int, int, int]]) -> None:
    texts, expected = [], set()
    for first, length, step in pieces:
        texts.append(f"{first}-{first + length}:{step}" if step > 1 else f"{first}-{first + length}")
        expected |= {task for task in range(first, first + length + 1) if (task - first) % step == 0}

    assert parse_tasks(",".join(texts)) == expected


@given(st.integers(1, 10**7), st.none() | _TASKS)
def test_names_are_read_back(number: int, tasks: frozenset[int] | None) -> None:
    name = render_name(str(number), tasks)

    assert parse_name(name) == (str(number), tasks)
    assert ("[" in name) == (tasks is not None and len(tasks) > 1)
    alone = [parse_name(one) for one in one_by_one(name)]
    assert alone == ([(str(number), None)] if tasks is None else [(str(number), {task}) for task in sorted(tasks)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("123", ("123", None)),
        ("123_4", ("123", {4})),
        ("123_[0,3-5%2]", ("123", {0, 3, 4, 5})),
        ("123_[7]", ("123", {7})),
        ("123_[0-8:4]", ("123", {0, 4, 8})),
    ],
)
def test_names_that_slurm_writes(name: str, expected: tuple[str, set[int] | None]) -> None:
    assert parse_name(name) == expected


@pytest.mark.parametrize("text", ["", "a", "1,,2", "0,2..."])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_tasks(text)


def test_long_lists_come_whole_from_slurm(cluster: Cluster) -> None:
    # Left to itself it ends a list behind 64 characters by `...`.
    tasks = frozenset(place * (place + 3) // 2 for place in range(24))
    submit = ("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true")
    job = cluster.client(*submit, f"--array={render_tasks(tasks)}").strip()

    assert len(render_tasks(tasks)) > 64
    assert {info.task for info in SlurmClient().jobs(job)} == tasks
