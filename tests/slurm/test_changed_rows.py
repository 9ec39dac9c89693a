"""Rows that change under a chain: corrected while nothing is trained on them, refused in the same run folder after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of


@pytest.fixture
def own_rows(job_config: Callable[..., Path], screenshots: Path, tmp_path: Path) -> Path:
    """my.yaml over copies of the rows, which a test may change; its jobs are held."""
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_bytes((screenshots / f"{name}.jsonl").read_bytes())
    splits = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}
    train = {"max_steps": 1, "eval_split": "val"}
    data = {"splits": splits, "image_root": str(screenshots)}
    return job_config(data=data, train=train, slurm={"sbatch": ["--hold"]})


def _drop_last(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def test_rows_are_corrected_only_when_the_chain_is_not_at_work(
    cluster: Cluster, verb: Callable[..., Any], own_rows: Path, tmp_path: Path
) -> None:
    assert verb("submit", "--config", own_rows).code == 0
    jobs = jobs_of(own_rows)
    _drop_last(tmp_path / "val.jsonl")
    assert verb("submit", "--config", own_rows).code == 0  # they decide no training
    _drop_last(tmp_path / "train.jsonl")

    refused = verb("submit", "--config", own_rows)

    assert refused.code == 2
    assert "jobs of this run folder are still queued or running (cache-train, cache-val, check, train, " in refused.err
    assert f"and the rows of split train ({tmp_path}/train.jsonl) have changed since they were submitted" in refused.err
    assert "or run `pipeline cancel" in refused.err
    assert jobs_of(own_rows) == jobs

    assert verb("cancel", "--config", own_rows).code == 0
    cluster.wait(list(jobs.values()))
    again = verb("submit", "--config", own_rows)
    assert again.code == 0, again.err
    assert verb("submit", "--config", own_rows).code == 0  # with the rows as they are now
    assert jobs_of(own_rows)["train"] != jobs["train"]


def test_rows_that_something_was_trained_on_are_not_exchanged(
    cluster: Cluster, verb: Callable[..., Any], own_rows: Path, tmp_path: Path
) -> None:
    for words in (["cache", "--split", "train"], ["cache", "--split", "val"], ["train", "--from-cache"]):
        assert verb(*words, "--config", own_rows).code == 0
    submitted = verb("submit", "--config", own_rows)
    assert submitted.out.startswith("1. eval\n"), submitted.err
    cluster.client("scancel", jobs_of(own_rows)["eval"])
    whole = (tmp_path / "train.jsonl").read_bytes()
    _drop_last(tmp_path / "train.jsonl")

    for options in ([], ["--dry-run"]):
        refused = verb("submit", "--config", own_rows, *options)
        assert refused.code == 2
        changed = f"the rows of split train ({tmp_path}/train.jsonl) have changed since they were trained on: train\n"
        assert f"{changed}  What to do: give another output_dir" in refused.err

    features = tmp_path / "run" / "features"
    elsewhere = ["--set", f"output_dir={tmp_path}/other", "--set", f"cache.dir={features}", "--dry-run"]
    assert verb("submit", "--config", own_rows, *elsewhere).out.endswith("1. train\n2. eval, after train\n")
    (tmp_path / "train.jsonl").write_bytes(whole)
    assert verb("submit", "--config", own_rows).out.startswith("1. eval\n")


def test_rows_that_were_corrected_before_training_read_them_are_those_that_count(
    cluster: Cluster, verb: Callable[..., Any], own_rows: Path, tmp_path: Path
) -> None:
    assert verb("submit", "--config", own_rows).code == 0
    jobs = jobs_of(own_rows)
    _drop_last(tmp_path / "train.jsonl")  # while all jobs wait
    for words in (["cache", "--split", "train"], ["cache", "--split", "val"], ["train", "--from-cache"]):
        assert verb(*words, "--config", own_rows).code == 0  # as the jobs would
    cluster.client("scancel", *jobs.values())
    cluster.wait(list(jobs.values()))

    again = verb("submit", "--config", own_rows)

    assert again.out.startswith("1. eval\n"), again.err
