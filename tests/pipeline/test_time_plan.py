"""Predicted times of jobs: the arithmetic on given figures, what is measured, and the verb."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cache.config import DataConfig
from cache.dataset import read_split
from cache.errors import StoppedError
from cache.progress import Silent
from pipeline.config import PipelineConfig, load_config
from pipeline.time_advice import Advice, Change, advise
from pipeline.time_calibrate import FOLDER, calibrate, write_subset
from pipeline.time_job import Measured, Piece, TimedJob, predict, restarts, side_by_side
from pipeline.time_measured import CALIBRATION, Found, choose, training_phases
from pipeline.time_plan import TimePlan
from pipeline.time_records import JobClock, Phase, TimeRecord, phase_of
from pipeline.time_span import Span, duration
from pipeline.time_trials import choose_trials
from pipeline.time_work import Amounts
from tests.pipeline.conftest import record

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


def test_the_first_bit_of_a_phase_is_work_but_not_part_of_its_rate() -> None:
    found = phase_of([(60.0, 1), (1.0, 1), (1.2, 1), (0.8, 1)])

    assert found == Phase(4, pytest.approx(1.0), 0.8, 1.2)
    assert phase_of([(3.0, 2)]) == Phase(2, 1.5, 1.5, 1.5)
    assert phase_of([]) is None


def _record(seconds: float, written: float, phase: Phase, **fields: Any) -> TimeRecord:
    return replace(TimeRecord("train", "gpu", 1, {"a": 1}, seconds, {"tokens": phase}, written), **fields)


def test_what_is_in_no_phase_is_the_constant() -> None:
    assert _record(100, 0, Phase(400, 0.2, 0.1, 0.3)).constant == 20


def test_runs_with_the_same_settings_and_device_are_taken_together_and_others_left_out() -> None:
    found = [
        Found(_record(130, 3, Phase(1000, 0.1, 0.09, 0.12)), "new"),
        Found(_record(240, 2, Phase(1000, 0.2, 0.2, 0.2)), "old"),
        Found(_record(9, 1, Phase(1000, 9.0, 9.0, 9.0), device="another"), "elsewhere"),
        Found(_record(9, 1, Phase(1000, 9.0, 9.0, 9.0), setting={"a": 2}), "otherwise"),
    ]

    taken = choose(found, "train", {"a": 1})
    assert taken is not None
    assert taken.rates["tokens"] == Span(0.09, pytest.approx(0.15), 0.2)
    assert taken.constant == Span(30, 35, 40)
    assert "new" in taken.source
    other = choose(found[:2], "train", {"a": 5})
    assert other is not None
    assert "measured with other settings: a 1" in other.source
    assert choose(found, "eval", {"a": 1}) is None


def test_the_log_of_a_training_tells_its_rate_also_when_a_kill_has_cut_it_off(tmp_path: Path) -> None:
    line = {"max_steps": 9, "seconds": 2.0, "samples_per_second": 8.0, "tokens_per_second": 100.0}
    lines = [json.dumps({"step": step, **line}) for step in (1, 2, 3, 4)]
    lines.append(json.dumps({"step": 4, "eval_runtime": 3.0, "eval_samples_per_second": 2.0}))
    lines.append(json.dumps({"step": 4, "save_runtime": 1.5}))
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "sec']))

    found = training_phases(tmp_path, from_step=1, batch=16)

    assert found["tokens"] == Phase(600, 0.01, 0.01, 0.01)
    assert found["evaluating"].seconds == 0.5
    assert found["saving"] == Phase(1, 1.5, 1.5, 1.5)


def test_a_job_that_fails_leaves_no_record_and_other_processes_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = _record(0, 0, Phase(1, 1, 1, 1), phases={})

    def work(fails: bool) -> None:
        with JobClock(Silent(), tmp_path, "job", blank) as clock:
            clock.start("encoding images", 2, "image")
            clock.advance()
            clock.advance()
            clock.finish()
            if fails:
                raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        work(True)
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "RANK", "1")
        work(False)
    assert not (tmp_path / "times").exists()
    work(False)
    written = TimeRecord.parse(json.loads((tmp_path / "times" / "job.json").read_text()))
    assert written is not None
    assert written.phases["encoding"].units == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.13, "8.1 s"), (200, "3 min 20 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")]
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "name", ["train.jsonl", "qwen_finetune.json", "sharegpt.json", "messages.jsonl", "stages.jsonl"]
)
def test_the_samples_of_a_calibration_are_those_of_the_data(data_dir: Path, tmp_path: Path, name: str) -> None:
    data = DataConfig(splits={"train": str(data_dir / name)})  # type: ignore[dict-item]
    file = write_subset(data, "train", 10**6, tmp_path)
    copied = {"path": file, "image_root": str(tmp_path / "images")}
    copy = DataConfig(splits={"train": copied}, format="messages")  # type: ignore[dict-item]

    def content(config: DataConfig) -> list[tuple[str, list[bytes]]]:
        records = read_split(config, "train").records
        texts = [
            "|".join(f"{t.role}{[getattr(p, 'text', '<image>') for p in t.content]}" for t in r.turns) for r in records
        ]
        return sorted(zip(texts, [[ref.read() for ref in r.images] for r in records], strict=True))

    assert content(copy) == content(data)
    assert len(read_split(copy, "train").records) == len(read_split(data, "train").records)
    write_subset(data, "train", 1, tmp_path)
    assert len({r.images[0].path for r in read_split(copy, "train").records}) == 1


def test_tokens_are_counted_as_training_computes_them(cached: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--set", "train.max_steps=2", "--set", "train.effective_batch_size=2"]
    assert run("train", "--config", cached, "--from-cache", *options).code == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    computed = [line["seconds"] * line["tokens_per_second"] for line in lines if "tokens_per_second" in line]

    settings = load_config(cached, ["train.effective_batch_size=2"])
    counted = Amounts(settings, Silent()).step_tokens(settings, 1, None)

    assert (counted.steps, counted.spread) == (2, 0.0)
    assert sum(computed) == pytest.approx(2 * counted.mean, rel=0.02)


def test_the_verb_predicts_from_the_logs_of_earlier_runs(cached: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    rare = ["--set", "train.save_steps=1000"]
    again = [*rare, "--set", "train.max_steps=40006", "--set", "slurm.signal_seconds=1", "--time-limit"]
    first = run("plan", "--config", cached, *again, "6h")
    # The chain of a split that is cached and is not evaluated on is one job.
    assert "the whole: not known: 1 job has no figure yet (run `pipeline plan --config ... --calibrate`" in first.out
    untold = json.loads(run("plan", "--config", cached, *again, "6h", "--json").out)
    assert (untold["jobs"]["train"]["verdict"], untold["jobs"]["train"]["seconds"]) == ("unknown", None)
    assert (untold["whole"]["seconds"], untold["whole"]["fits"], untold["fits"]) == (None, None, None)
    assert run("train", "--config", cached, "--from-cache", "--set", "train.max_steps=6", *rare).code == 0

    found = json.loads(run("plan", "--config", cached, *again, "30s", "--json").out)

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["seconds"] for line in lines if "tokens_per_second" in line]
    train = found["jobs"]["train"]["seconds"]
    likely = 40000 * sum(steps[1:]) / len(steps[1:])
    # Loading comes on top of the steps; it is short on a tiny model.
    assert likely * 0.99 <= train["likely"] <= likely + 60
    assert train["low"] < train["likely"] < train["high"]
    assert found["jobs"]["train"]["restarts"]["likely"] > 0
    assert found["jobs"]["train"]["measured_in"][0].startswith("train: times/train.json")
    # More GPUs are no advice where a CPU was measured.
    assert [one["setting"] for one in found["advice"]] == ["train.max_steps: 4000"]
    told = run("plan", "--config", cached, *again, "30s").out
    assert "restart" in told
    assert "not enough alone:" in told


def test_the_verb_predicts_caching_part_by_part(
    config: Callable[..., Path], run: Callable[..., Any], tmp_path: Path
) -> None:
    file = config(*(record(f"good{number}.png") for number in range(3)), slurm={"cache": {"num_parts": 2}})
    given = TimeRecord("cache", "cpu", 1, {}, 30.0, {"encoding": Phase(10, 1000.0, 900.0, 1100.0)}, 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CALIBRATION).write_text(json.dumps([asdict(given)]))

    found = json.loads(run("plan", "--config", file, "--time-limit", "45m", "--json").out)

    images = Amounts(load_config(file), Silent()).cache("train", 2)
    largest = max(part["encoding"] for part in images.values())
    assert sum(part["encoding"] for part in images.values()) == 3
    assert found["jobs"]["cache-train"]["seconds"]["likely"] == largest * 1000
    assert found["jobs"]["cache-train"]["tasks"] == 2
    assert "measured with other settings" in found["jobs"]["cache-train"]["measured_in"][0]


def test_an_experiment_with_stages_is_predicted_stage_by_stage(
    cached: Path, run: Callable[..., Any], tmp_path: Path
) -> None:
    experiments = "experiments={a: {train: {max_steps: 300}}, b: {stages: {one: {}, two: {train: {max_steps: 40}}}}}"
    given = TimeRecord("train", "cpu", 1, {}, 1.0, {"tokens": Phase(10, 0.1, 0.1, 0.1)}, 0.0)
    others = [TimeRecord(name, "cpu", 1, {}, 0.0, {}, 0.0) for name in ("eval", "compare")]
    (tmp_path / "run" / CALIBRATION).write_text(json.dumps([asdict(one) for one in (given, *others)]))
    options = ["--config", cached, "--set", experiments, "--time-limit", "1h", "--json"]

    jobs = json.loads(run("plan", *options).out)["jobs"]
    allocation = [*options, "--set", "slurm.experiments=allocation", "--set", "slurm.train.gpus=2"]
    together = json.loads(run("plan", *allocation, "--set", f"data.splits.val={_train_file(cached)}").out)["jobs"]

    seconds = {name: found["seconds"]["likely"] for name, found in jobs.items()}
    assert seconds["train-a"] == pytest.approx(300 * seconds["train-b+one"], rel=1e-3)
    assert seconds["train-b+two"] == pytest.approx(40 * seconds["train-b+one"], rel=1e-3)
    assert jobs["train-b+two"]["after"] == ["check", "train-b+one"]
    assert together["experiments"]["seconds"]["likely"] == pytest.approx(seconds["train-a"], rel=1e-3)


def test_settings_that_make_training_fit_are_named_with_their_times(
    cached: Path, run: Callable[..., Any], tmp_path: Path
) -> None:
    trials = [
        {"tokens_per_pack": 8192, "gradient_checkpointing": False, "seconds": 1.0, "peak_bytes": 1},
        {"tokens_per_pack": 2048, "gradient_checkpointing": True, "seconds": 4.0, "peak_bytes": 1},
    ]
    rate, instant = Phase(10, 1.0, 1.0, 1.0), Phase(10, 0.0, 0.0, 0.0)
    phases = {"tokens": rate, "tokenizing": instant, "saving": instant}
    given = TimeRecord("train", "NVIDIA H100", 1, {}, 10.0, phases, 0.0, trials)
    (tmp_path / "run" / CALIBRATION).write_text(json.dumps([asdict(given)]))
    settings = ["max_steps=-1", "num_train_epochs=30", "tokens_per_pack=2048", "gradient_checkpointing=true"]
    options = [word for setting in settings for word in ("--set", f"train.{setting}")]
    before = json.loads(run("plan", "--config", cached, *options, "--time-limit", "1d", "--json").out)
    seconds = before["jobs"]["train"]["seconds"]["likely"]
    limit = ["--set", "slurm.signal_seconds=1", "--time-limit", f"{int(seconds * 0.6)}s"]

    found = json.loads(run("plan", "--config", cached, *options, *limit, "--json").out)["advice"]

    advice = {one["setting"]: one for one in found}
    assert list(advice) == [
        "slurm.train.gpus: 4",
        "train.tokens_per_pack: 8192, train.gradient_checkpointing: false",
        "train.num_train_epochs: 16",
    ]
    assert all(one["fits"] for one in found)
    rows, epochs = (advice[name]["jobs"]["train"]["likely"] for name in list(advice)[1:])
    assert rows == pytest.approx(seconds / 4)
    assert epochs == pytest.approx(seconds * 16 / 30)


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_calibration_leaves_nothing_and_says_so(cached: Path, tmp_path: Path, *, again: bool) -> None:
    settings = load_config(cached)
    scratch = tmp_path / "run" / FOLDER

    def stop() -> bool:
        # In the middle of the first of its runs, whose log is then there.
        if again and list(scratch.rglob("*.log")):
            raise KeyboardInterrupt  # as a second signal does
        return bool(list(scratch.rglob("*.log")))

    with pytest.raises(StoppedError, match="nothing of this calibration is kept") as stopped:
        calibrate(settings, 4, Silent(), stop)

    assert "begins anew" in str(stopped.value.do)
    assert not scratch.exists()
    assert not (tmp_path / "run" / CALIBRATION).exists()


def _train_file(config: Path) -> str:
    settings: PipelineConfig = load_config(config)
    return settings.data.splits["train"].path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--time-limit", "soon"], "--time-limit soon: must be a time such as 6h"),
        (["--time-limit", "6h", "--split", "train"], "do not go with --time-limit"),
    ],
)
def test_options_of_the_verb_that_cannot_be(
    cached: Path, run: Callable[..., Any], options: list[str], message: str
) -> None:
    run("plan", "--config", cached, *options).check_refusal(2, message)
