"""`pipeline plan --time-limit` as a user types it: calibration, the work that is counted, what is advised."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cache.config import DataConfig
from cache.dataset import read_split
from cache.errors import StoppedError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.time_calibrate import FOLDER, calibrate, write_subset
from pipeline.time_measured import CALIBRATION
from pipeline.time_records import Phase, TimeRecord
from pipeline.time_work import Amounts
from tests.pipeline.conftest import record


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
    assert f"the whole: not known: 1 job has no figure yet (run `pipeline plan --config {cached} --set=" in first.out
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


@pytest.mark.parametrize("report_to", ["[tensorboard]", "[wandb]", "[tensorboard, wandb]"])
def test_a_calibration_reports_its_trial_runs_nowhere(cached: Path, tmp_path: Path, report_to: str) -> None:
    settings = load_config(cached, [f"train.report_to={report_to}"])
    seen: list[Any] = []

    def stop() -> bool:
        files = (tmp_path / "run" / FOLDER).rglob("*.yaml")
        seen.extend(load_config(file).train.report_to for file in files)
        return True

    with pytest.raises(StoppedError):
        calibrate(settings, 4, Silent(), stop)

    assert seen
    assert set(seen) == {("none",)}


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
