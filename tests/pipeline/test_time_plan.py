"""Predicted times of jobs: the arithmetic on given figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.time_advice import Advice, Change, advise
from pipeline.time_job import Measured, Piece, TimedJob, predict, restarts, side_by_side
from pipeline.time_plan import TimePlan
from pipeline.time_span import Span, duration
from pipeline.time_trials import choose_trials

HOUR = 3600.0


def exactly(seconds: float) -> Span:
    """A time without uncertainty."""
    return Span(seconds, seconds, seconds)


def piece(seconds: float, constant: float = 0.0, processes: int = 1, **work: float) -> Piece:
    """Work whose units take a second each; `seconds` of them are tokens."""
    measured = Measured(exactly(constant), {"tokens": exactly(1.0), "encoding": exactly(1.0)}, 1, "gpu", "given")
    return Piece("piece", measured, {"tokens": seconds, **work}, processes=processes)


def job(name: str, *seconds: float, limit: float = HOUR, constant: float = 0.0, **options: Any) -> TimedJob:
    """A job of lines that take so long."""
    return TimedJob(name, tuple((piece(s, constant),) for s in seconds), limit, **options)


@pytest.mark.parametrize(
    ("total", "constant", "usable", "goes_on", "expected"),
    [
        (100, 10, 100, True, 0),
        (101, 10, 100, True, 1),
        (190, 10, 100, True, 1),  # 90 and 90 of work
        (191, 10, 100, True, 2),
        (101, 100, 100, True, math.inf),  # a start takes the whole limit
        (101, 10, 100, False, math.inf),
    ],
)
def test_every_start_costs_its_constant_again(
    total: float, constant: float, usable: float, goes_on: bool, expected: float
) -> None:
    assert restarts(total, constant, usable, goes_on=goes_on) == expected


def test_a_restarted_job_takes_its_work_and_a_constant_for_each_start() -> None:
    found = predict(job("train", 2.5 * HOUR, limit=HOUR, lead=0, constant=360))

    assert found.restarts.likely == 2
    assert found.wall.likely == pytest.approx(2.5 * HOUR + 3 * 360)
    assert found.verdict == "needs 2 restarts"
    bounded = predict(job("train", 2.5 * HOUR, limit=HOUR, lead=0, constant=360, most_restarts=1))
    assert bounded.verdict == "needs 2 restarts, slurm.max_requeues ALLOWS 1"


def test_a_job_that_cannot_go_on_must_fit_as_a_whole() -> None:
    found = predict(job("eval", 1.5 * HOUR))

    assert (found.verdict, found.fits, math.isinf(found.wall.likely)) == ("DOES NOT FIT", False, True)


def test_a_time_that_may_be_longer_than_the_limit_does_not_count_as_fitting() -> None:
    measured = Measured(exactly(0), {"tokens": Span(0.5, 1.0, 1.5)}, 1, "gpu", "given")
    lines = ((Piece("train", measured, {"tokens": 3000}),),)
    found = predict(TimedJob("train", lines, HOUR, lead=300))

    assert (found.verdict, found.fits) == ("may need a restart", False)
    assert found.longest == Span(1500, 3000, 4500)


def test_lines_run_side_by_side_in_so_many_slots() -> None:
    assert side_by_side([5, 4, 3, 3, 3], 2) == 10
    assert side_by_side([5, 4, 3], None) == 5
    array = job("cache", 10, 20, 30, array=True, at_once=2)
    assert predict(array).longest.likely == 30
    assert predict(array).wall.likely == 40
    allocation = job("experiments", 10, 20, 30, at_once=2)
    assert predict(allocation).longest.likely == 30  # the longest starts first


def test_the_whole_is_the_longest_way_through_the_chain() -> None:
    jobs = (
        job("cache-train", 50, 60, array=True),
        job("cache-val", 5),
        job("check", 1, after=("cache-train", "cache-val")),
        job("train-a", 100, after=("check",)),
        job("train-b", 200, after=("check",)),
        job("eval-a", 500, after=("check", "train-a")),
    )
    plan = TimePlan(jobs, limit=600)

    assert plan.whole == exactly(60 + 1 + 100 + 500)
    assert (plan.misfits, plan.whole_fits, plan.figures()["fits"]) == ([], False, False)
    assert "the whole: 11 min 1 s" in plan.describe()
    assert "DOES NOT FIT 10 min" in plan.describe()


def _unmeasured(name: str, **options: Any) -> TimedJob:
    return TimedJob(name, ((Piece(name, None, {"tokens": 5}),),), HOUR, lead=10, **options)


def test_what_was_never_measured_is_not_known_to_fit() -> None:
    plan = TimePlan((_unmeasured("train"), job("eval", 30, after=("train",))), limit=HOUR)

    found = plan.figures()
    train = found["jobs"]["train"]
    assert train["not_in_it"] == {"train": ["everything"]}
    assert [train[name] for name in ("seconds", "wall_seconds", "restarts", "fits")] == [None] * 4
    assert train["verdict"] == "unknown"
    assert (found["whole"]["seconds"], found["whole"]["fits"], found["fits"]) == (None, None, None)
    assert (found["jobs"]["eval"]["fits"], found["jobs"]["eval"]["verdict"]) == (True, "fits")
    assert "the whole: not known: 1 job has no figure yet (run `pipeline plan" in plan.describe()
    assert (plan.misfits, advise(plan, iter([]))) == ([], [])


@pytest.mark.parametrize("seconds", [10, 2 * HOUR])
def test_an_allocation_with_one_experiment_that_was_never_measured_is_not_known(seconds: float) -> None:
    lines = ((piece(seconds),), (Piece("other", None, {"tokens": 5}),))
    plan = TimePlan((TimedJob("experiments", lines, HOUR, lead=10),))

    found = plan.figures()["jobs"]["experiments"]
    assert (found["seconds"], found["verdict"], found["fits"], plan.fits) == (None, "unknown", None, None)


def test_what_is_measured_may_be_too_long_even_if_the_rest_is_not_known() -> None:
    plan = TimePlan((job("a", 100), job("b", 100, after=("a",)), _unmeasured("c", after=("b",))), limit=150)

    assert (plan.whole, plan.whole_fits, plan.fits, plan.misfits) == (None, False, False, [])
    assert "the others alone: 3 min 20 s (3 min 20 s - 3 min 20 s), DOES NOT FIT" in plan.describe()
    (found,) = advise(plan, iter([iter([Change("fast", {"a": job("a", 40)})])]))
    assert (found.fits, found.whole_fits, found.whole) == (None, None, None)
    assert found.figures()["whole"] is None
    assert "the whole not known" in found.describe()


def test_work_without_a_figure_is_named_and_not_counted() -> None:
    partly = TimedJob("cache", ((piece(0, encoding=1, reading=7),),), HOUR)
    plan = TimePlan((partly,), limit=HOUR)

    assert plan.known is False
    assert partly.unknown == {"piece": ["reading"]}
    found = plan.figures()
    assert found["jobs"]["cache"]["seconds"]["likely"] == 1
    assert (found["jobs"]["cache"]["verdict"], found["whole"]["fits"], found["fits"]) == ("unknown", None, None)
    assert "not known: not all is measured" in plan.describe()
    assert "not known whether it fits 1 h" in plan.describe()
    too_long = TimedJob("cache", ((piece(0, encoding=2 * HOUR, reading=7),),), HOUR)
    assert TimePlan((too_long,)).fits is False


def test_several_processes_do_less_than_so_many_times_the_work_of_one() -> None:
    one, two = piece(100).total, piece(100, processes=2).total  # the work of the process with most

    assert (two.low, two.high > two.likely > one.likely) == (100, True)


def test_the_slightest_change_that_fits_is_advised_and_what_does_not_suffice_is_said() -> None:
    plan = TimePlan((job("cache", 2 * HOUR, array=True, lead=0), job("train", 5 * HOUR, lead=0, after=("cache",))))

    def parts() -> Iterator[Change]:
        for count in (2, 4, 8):
            yield Change(f"parts {count}", {"cache": job("cache", *[2.5 * HOUR / count] * count, array=True, lead=0)})

    def epochs() -> Iterator[Change]:
        for count in (2, 1):
            yield Change(f"epochs {count}", {"train": job("train", count * 1.5 * HOUR, lead=0, after=("cache",))})

    found = advise(plan, iter([parts(), epochs()]))

    assert [(one.setting, one.fits) for one in found] == [("parts 4", True), ("epochs 1", False)]
    assert found[0].jobs == {"cache": exactly(0.625 * HOUR)}
    assert isinstance(found[1], Advice)
    assert found[1].jobs["train"].likely == 1.5 * HOUR
    fitting = TimePlan((job("cache", 10),))
    assert advise(fitting, iter([parts()])) == []


def test_where_only_the_whole_does_not_fit_the_whole_decides() -> None:
    plan = TimePlan((job("a", 100), job("b", 100, after=("a",))), limit=150)
    changes = [Change("slow", {"a": job("a", 80)}), Change("fast", {"a": job("a", 40)})]

    (found,) = advise(plan, iter([iter(changes)]))

    assert (found.setting, found.fits, found.whole) == ("fast", True, exactly(140))


def test_trials_tell_which_rows_would_be_faster() -> None:
    trials = [
        {"tokens_per_pack": 8192, "gradient_checkpointing": False, "seconds": 2.0, "peak_bytes": 1},
        {"tokens_per_pack": 4096, "gradient_checkpointing": False, "seconds": 2.5, "peak_bytes": 1},
        {"tokens_per_pack": 8192, "gradient_checkpointing": True, "seconds": 3.0, "peak_bytes": 1},
        {"tokens_per_pack": 16384, "gradient_checkpointing": False, "seconds": None, "peak_bytes": 1},
    ]

    set_by_hand = choose_trials(trials, 8192, True)
    assert set_by_hand.current is not None
    assert set_by_hand.current.seconds == 3.0
    assert [(t.tokens_per_pack, t.gradient_checkpointing) for t in set_by_hand.faster] == [(4096, False), (8192, False)]
    taken = choose_trials(trials, "auto", False)
    assert taken.current is not None
    assert (taken.current.seconds, taken.faster) == (2.0, ())
    assert choose_trials([], 8192, False).current is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.13, "8.1 s"), (200, "3 min 20 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")]
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
