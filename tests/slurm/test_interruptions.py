"""Signals, preemption and a dying node: the job goes back into the queue and goes on exactly."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of, steps_of

pytestmark = pytest.mark.timeout(900)
_STOPS = """\
import os, signal, sys
from cache.errors import StoppedError
from pipeline.exit import exit_code_of, stop_request
from pipeline.requeue import requeue_if_asked, take_limit

def work():
    os.kill(os.getpid(), signal.SIGUSR1)
    raise StoppedError("stopped", do="go on")

limit = take_limit()
stop_request.install()
code = exit_code_of(work)
requeue_if_asked(limit, stop_request, code)
sys.exit(code)
"""


def _submit_training(verb: Callable[..., Any], config: Path) -> str:
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    assert "1. train\n2. eval, after train\n" in submitted.out
    return jobs_of(config)["train"]


def _signal(cluster: Cluster, job: str, restarts: int) -> None:
    """As it comes ahead of the time limit."""
    cluster.client("scancel", "--signal=USR1", "--batch", job)
    cluster.until(lambda: cluster.show(job, "Restarts") == str(restarts), "it goes back into the queue")


def _preempt(cluster: Cluster, job: str, restarts: int) -> None:
    """A job of a partition that goes first; it wants all of both nodes."""
    urgent = cluster.client(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).strip()
    cluster.until(lambda: cluster.show(job, "Restarts") == str(restarts), "it is preempted")
    assert cluster.wait([urgent]) == {urgent: "COMPLETED"}


def _kill_node(cluster: Cluster, job: str, restarts: int) -> None:
    """A node that dies takes what was done since the last checkpoint with it."""
    node = cluster.show(job, "BatchHost")
    cluster.kill_node(node)
    cluster.client("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
    cluster.until(lambda: cluster.show(job, "Restarts") == str(restarts), "the dead node's job is queued again")
    cluster.start_node(node)


@pytest.mark.parametrize(
    ("interruptions", "steps"),
    [
        ([_signal], 200),
        pytest.param([_signal, _preempt, _kill_node], 400, marks=pytest.mark.soak),
    ],
    ids=["a signal", "a signal, a preemption, a dying node"],
)
def test_after_interruptions_the_adapter_is_bit_identical(
    cluster: Cluster,
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    features: Path,
    tmp_path: Path,
    interruptions: list[Callable[[Cluster, str, int], None]],
    steps: int,
) -> None:
    train = {"max_steps": steps, "save_steps": 20, "save_total_limit": 1}
    config = job_config(cache={"dir": str(features)}, train=train)
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert verb("train", "--config", config, "--from-cache", "--set", f"output_dir={whole}").code == 0
    job = _submit_training(verb, config)

    after = 0
    for number, interrupt in enumerate(interruptions, 1):
        wanted = after + 25
        cluster.until(
            lambda wanted=wanted: max(steps_of(run), default=0) >= wanted,
            f"training is past step {wanted}",
            now=lambda: _log(run, job),
        )
        said = verb("status", "--config", config).out
        assert re.search(rf"step \d+ of {steps}, ends about .*, before its limit ", said)
        interrupt(cluster, job, number)
        after = max(steps_of(run))
        if interrupt is not _kill_node:
            assert (run / f"checkpoint-{after}").is_dir()
            assert f"put back into the queue {number} times" in verb("status", "--config", config).out

    assert cluster.wait([job]) == {job: "COMPLETED"}
    assert steps_of(run) == list(range(1, steps + 1))
    adapter = "adapter/adapter_model.safetensors"
    assert (run / adapter).read_bytes() == (whole / adapter).read_bytes()
    log = _log(run, job)
    assert f"job {job} goes back into the queue, for the 1. time of at most 20" in log
    assert log.count("going on from") == len(interruptions)


def _log(run: Path, job: str) -> str:
    return (run / "slurm" / "logs" / f"train.{job}.log").read_text()


def test_caching_commits_its_shard_and_goes_on(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path
) -> None:
    from pipeline.demo.screenshots import make_screenshots

    make_screenshots(tmp_path / "many", train_images=400, val_images=1)
    config = job_config(
        data={"splits": {"train": str(tmp_path / "many/train.jsonl")}},
        cache={"shard_size": 200_000},
        slurm={"cache": {"num_parts": 1}},
    )
    assert verb("submit", "--config", config).code == 0
    job = jobs_of(config)["cache-train"]
    features = tmp_path / "run" / "features"

    def committed() -> int:
        return sum(len(json.loads(file.read_text())["entries"]) for file in features.glob("*/shards/*.json"))

    cluster.until(lambda: committed() > 20, "some shards are committed")
    cluster.client("scancel", "--signal=USR1", "--batch", f"{job}_0")
    cluster.until(lambda: cluster.show(f"{job}_0", "Restarts") == "1", "it goes back into the queue")
    kept = committed()
    assert re.search(r"\d+ of 400 images of the split are committed", verb("status", "--config", config).out)
    assert 20 < kept < 400
    assert cluster.wait([job]) == {job: "COMPLETED"}
    assert committed() == 400
    log = (tmp_path / "run" / "slurm" / "logs" / f"cache-train.{job}_0.log").read_text()
    assert f"encoded now      {400 - kept} images" in log
    assert verb("cancel", "--config", config).code == 0


def test_a_job_goes_back_into_the_queue_so_often_at_most(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "stops.py"
    file.write_text(_STOPS)
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --open-mode=append\n#SBATCH --requeue\n#SBATCH --mem=500M\n"
        f"#SBATCH --output={tmp_path}/log\nexport PIPELINE_MAX_REQUEUES=1\nexec {sys.executable} {file}\n"
    )
    job = cluster.client("sbatch", "--parsable", str(script)).strip()

    assert cluster.wait([job]) == {job: "FAILED"}
    assert cluster.show(job, "ExitCode") == "138:0"
    assert cluster.show(job, "Restarts") == "1"
    log = (tmp_path / "log").read_text()
    assert log.count("goes back into the queue, for the 1. time of at most 1") == 1
    assert f"job {job} was put back into the queue 1 times already (slurm.max_requeues: 1)" in log


@pytest.mark.soak
def test_the_time_limit_itself_sends_the_signal(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    train = {"max_steps": 10**6, "save_steps": 10**6}
    slurm = {"signal_seconds": 30, "train": {"time": "2m"}}
    config = job_config(cache={"dir": str(features)}, train=train, slurm=slurm)
    job, run = _submit_training(verb, config), tmp_path / "run"

    cluster.until(lambda: len(steps_of(run)) > 50, "training runs", now=lambda: _log(run, job))
    assert "it will go back into the queue then and go on" in verb("status", "--config", config).out
    cluster.until(lambda: cluster.show(job, "Restarts") == "1", "the limit is near", now=lambda: _log(run, job))
    kept = max(steps_of(run))
    assert (run / f"checkpoint-{kept}").is_dir()
    cluster.until(lambda: max(steps_of(run)) > kept + 20, "it goes on", now=lambda: _log(run, job))
    assert verb("cancel", "--config", config).out.startswith("cancelled train ")
    assert cluster.wait([job]) == {job: "CANCELLED"}  # for good, though it is told to stop as well
    assert cluster.show(job, "Restarts") == "1"
