"""`pipeline experiments` as a user types it, its trainings and evaluations as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeline.config_file import load_config
from pipeline.experiment_run import lines, slots
from pipeline.experiments import experiments_of
from pipeline.options import PROGRAM

EXPERIMENTS: dict[str, Any] = {
    "broken": {"train": {"split": "nowhere"}},
    "plain": {"train": {"max_steps": 1}},
    "staged": {"stages": {"first": None, "second": {"train": {"order": "file"}}}},
}


@pytest.fixture
def file(
    write_config: Callable[..., Path],
    data_dir: Path,
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """my.yaml with three experiments over a cache that is there; one of them must fail."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    splits = {"train": str(data_dir / "stages.jsonl"), "val": str(data_dir / "val.jsonl")}
    train = {"max_steps": 2, "eval_split": None, "device": "cpu"}
    evaluation = {"limit": 1, "max_new_tokens": 2}
    written = write_config(
        splits, train=train, eval=evaluation, experiments=EXPERIMENTS, cache={"dir": str(tmp_path / "features")}
    )
    for split in splits:
        assert run("cache", "--config", written, "--split", split).code == 0
    return written


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The scheduler's own lines since the last call, without times and places."""
    caplog.set_level("INFO", logger="pipeline")

    def take() -> list[str]:
        taken = [
            r.getMessage().partition(", log in")[0].partition(" after ")[0]
            for r in caplog.records
            if r.name == "pipeline"
        ]
        caplog.clear()
        return taken

    return take


def test_all_run_on_their_gpus_and_a_rerun_takes_up_what_is_missing(
    run: Callable[..., Any],
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    logged: Callable[[], list[str]],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    arguments = ("experiments", "--config", file, "--gpus", "2")

    first = run(*arguments)

    first.check_refusal(2, "1 of 3 experiments failed:", "broken train (exit code 2); the end of ", "nowhere")
    said = logged()
    # Two stages of two steps are longer than one of one.
    assert said[0] == "staged/first train: started on GPU 4"
    assert said[1].startswith(("plain train: started on GPU 7", "broken train: started on GPU 7"))
    for name in (
        "staged/first train",
        "staged/second train",
        "staged/second eval-val",
        "plain train",
        "plain eval-val",
    ):
        assert f"{name}: done" in said
    assert [line for line in said if line.startswith("staged") and "started" in line] == [
        f"staged/{name}: started on GPU 4" for name in ("first train", "second train", "second eval-val")
    ]
    assert "broken: training is not finished" in first.out
    run_folder = tmp_path / "run"
    assert (run_folder / "staged" / "second" / "train.log").read_text().endswith("adapter\n")
    scores = json.loads((run_folder / "staged" / "second" / "eval-val" / "metrics.json").read_text())
    assert "loss" in scores
    assert {f.name for f in run_folder.glob("comparison.*")} == {"comparison.md", "comparison.csv", "comparison.svg"}

    # A rerun would take up only what is missing; test_allocation runs one.
    mended = run(*arguments, "--dry-run", "--set", "experiments.broken.train.split=train")
    assert mended.code == 0, mended.err
    assert [line.partition("to do: ")[2] for line in mended.out.splitlines()[1:]] == [
        "broken train, broken eval-val",
        "nothing",
        "nothing",
    ]


def test_a_signal_lets_the_training_write_a_checkpoint_and_a_rerun_goes_on(
    run: Callable[..., Any], file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The only checkpoint is that of the signal.
    arguments = [f"--config={file}", "--experiment=plain", "--set=train.save_steps=1000000"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    metrics = tmp_path / "run" / "plain" / "metrics.jsonl"

    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*PROGRAM, "experiments", *arguments, "--set=experiments.plain.train.max_steps=100000"],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGUSR1)  # SIGTERM in test_allocation
        code = process.wait(60)

    said = (tmp_path / "out").read_text()
    assert code == 128 + signal.SIGUSR1, said
    assert "plain train: stopped" in said
    assert len(list(metrics.parent.glob("checkpoint-*"))) == 1
    assert "a checkpoint is written" in (metrics.parent / "train.log").read_text()
    caplog.set_level("INFO", logger="train")
    steps = len(metrics.read_text().splitlines()) + 2
    again = run("train", "--from-cache", *arguments, f"--set=experiments.plain.train.max_steps={steps}")
    assert again.code == 0, again.err
    assert any(record.getMessage().startswith("going on from") for record in caplog.records)


def test_what_is_not_there_is_refused_before_anything_starts(
    run: Callable[..., Any], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    on_gpu = ("--set", "train.device=auto")

    run("experiments", "--config", file, "--gpus", "2", *on_gpu).check_refusal(
        2, "--gpus 2: 0 GPUs are visible here", "train.device: cpu"
    )
    run("experiments", "--config", file, *on_gpu).check_refusal(2, "no GPU is visible here")
    run("experiments", "--config", file, "--split", "test").check_refusal(2, "--split test: data.splits names only")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    run("experiments", "--config", file, "--gpus", "3", *on_gpu).check_refusal(2, "--gpus 3: 2 GPUs are visible here")


@pytest.mark.parametrize("options", [("--dry-run",), ()])
def test_a_split_that_a_later_step_reads_and_that_is_not_cached_is_told_before_anything_starts(
    run: Callable[..., Any], file: Path, data_dir: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    extra, folder = f"data.splits.extra={data_dir / 'val.jsonl'}", tmp_path / "run"
    later = "experiments.staged.stages.second.train.split=extra"
    arguments = ("experiments", "--config", file, "--gpus", "1", "--set", extra, *options)

    stage = run(*arguments, "--set", later)

    stage.check_refusal(
        4,
        "split 'extra' has not been cached yet; needed by staged/second train",
        f"`pipeline cache --config {file} --set={extra} --set={later} --split extra`",
    )
    run(*arguments, "--split", "extra").check_refusal(
        4, "split 'extra'", "needed by broken eval-extra", "--split extra`"
    )
    inner = run(*arguments, "--set", "experiments.plain.train.eval_split=extra")
    inner.check_refusal(4, "needed by plain train")
    nowhere = run(*arguments, "--set", f"cache.dir={tmp_path / 'nowhere'}")
    nowhere.check_refusal(
        4, "split 'train' is needed by", "split 'val' is needed by", "--split val`, then `", "--split train`"
    )
    assert not list(folder.rglob("*.log"))
    assert not list(folder.glob("comparison.*"))


def test_what_is_done_needs_no_cache(run: Callable[..., Any], file: Path, tmp_path: Path) -> None:
    assert run("experiments", "--config", file, "--gpus", "1", "--experiment", "plain").code == 0
    gone = ("--set", f"cache.dir={tmp_path / 'nowhere'}", "--gpus", "1", "--dry-run")

    done = run("experiments", "--config", file, "--experiment", "plain", *gone)

    assert "to do: nothing" in done.out
    assert done.code == 0, done.err
    run("experiments", "--config", file, *gone).check_refusal(4, "split 'val' is needed by")


def test_a_damaged_run_file_is_told_by_its_own_training_and_stops_no_other(
    run: Callable[..., Any], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    damaged = tmp_path / "run" / "broken" / "run.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"settings"')
    mended = "experiments.broken.train.split=train"

    done = run("experiments", "--config", file, "--experiment=broken", "--experiment=plain", "--set", mended)

    done.check_refusal(
        2, "1 of 2 experiments failed:", "broken train (exit code 2); the end of ", f"{damaged}: is damaged"
    )
    assert f"broken: whether training is finished: {damaged} is damaged" in done.out
    assert (tmp_path / "run" / "plain" / "eval-val" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("visible", "there", "count", "expected"),
    [
        ("3,GPU-abc", 0, 2, ["3", "GPU-abc"]),  # listed by SLURM, but fake
        ("3,5,7", 3, 2, ["3", "5"]),
        (None, 3, None, ["0", "1", "2"]),
        ("0,1,2,3", 2, None, ["0", "1"]),  # no more than there are
        ("NoDevFiles", 0, 2, ["", ""]),  # train.device is cpu
        ("-1", 0, None, [""]),
        (None, 0, 3, ["", "", ""]),
    ],
)
def test_slots(
    file: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, there: int, count: int | None, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert slots(experiments_of(load_config(file)), count) == expected


def test_sizes_count_samples_of_all_stages_that_are_still_to_do(
    write_config: Callable[..., Path], data_dir: Path
) -> None:
    stages = {"first": {"train": {"num_train_epochs": 2}}, "second": {"train": {"max_steps": 10}}}
    experiments = {"epochs": None, "staged": {"stages": stages}, "unreadable": {"train": {"split": "nowhere"}}}
    splits = {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}
    file = write_config(splits, experiments=experiments)

    found = lines(experiments_of(load_config(file)), ["val"], file, [])

    assert {line.name: line.size for line in found} == {"epochs": 3 * 37, "staged": 2 * 37 + 10 * 4, "unreadable": 0}


def test_a_file_without_experiments_runs_too(run: Callable[..., Any], file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    del content["experiments"]
    file.write_text(yaml.safe_dump(content))

    result = run("experiments", "--config", file, "--dry-run", "--gpus", "1")

    assert result.code == 0, result.err
    assert "the run: 8 samples to train on; to do: train, eval-val" in result.out
