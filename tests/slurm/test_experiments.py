"""Five experiments over one cache, as jobs of their own and in one allocation of four GPUs."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of

pytestmark = pytest.mark.timeout(900)

EXPERIMENTS: dict[str, Any] = {
    "random": {"train": {"order": "sample"}},
    "reordered": {"train": {"seed": 7}},
    "stages": {"stages": {"first": {}, "second": {"train": {"learning_rate": 1e-3}}}},
    "broken": {"train": {"max_grad_norm": 0.5}},
    "last": {"train": {"max_steps": 60}},
}
_PROGRAM = re.compile(r"\bpipeline\b")


def _config(job_config: Callable[..., Path], features: Path, **slurm: Any) -> Path:
    return job_config(
        cache={"dir": str(features)},
        train={"max_steps": 3, "device": "cpu"},
        eval={"limit": 2},
        experiments=EXPERIMENTS,
        slurm=slurm,
    )


def _gpus_in_use(cluster: Cluster) -> Counter[tuple[str, str]]:
    """(node, GPU) -> how many of our processes have it to themselves at this moment."""
    found: Counter[tuple[str, str]] = Counter()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(p.split("=", 1) for p in (folder / "environ").read_text().split("\0") if "=" in p)
            command = (folder / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        gpu = variables.get("CUDA_VISIBLE_DEVICES", "")
        if variables.get("SLURM_CONF") == str(cluster.conf) and gpu.isdigit() and _PROGRAM.search(command):
            found[variables.get("SLURMD_NODENAME", ""), gpu] += 1
    return found


def _compared(run: Path) -> list[str]:
    """The experiments of the table."""
    with (run / "comparison.csv").open(newline="") as file:
        return [row["experiment"] for row in csv.DictReader(file)]


def _wait_and_watch(cluster: Cluster, jobs: list[str]) -> tuple[dict[str, str], int, int]:
    """States of the jobs when they have ended; how many processes had one GPU at once, and how many GPUs were busy."""
    most, busy = 0, 0

    def watch() -> bool:
        nonlocal most, busy
        used = _gpus_in_use(cluster)
        most, busy = max([most, *used.values()]), max(busy, len(used))
        return not set(jobs) & set(cluster.client("squeue", "-h", "-o", "%A").split())

    cluster.until(watch, "all jobs have ended")
    return {job: cluster.state(job) for job in jobs}, most, busy


def test_five_experiments_as_jobs(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    trap = '[ "$SLURM_JOB_NAME" != train-broken ] || false'
    config = _config(job_config, features, setup=[trap])
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    assert "train-stages+second, after train-stages+first\n" in submitted.out
    assert "compare, after eval-random, eval-reordered, eval-stages, eval-broken, eval-last" in submitted.out
    jobs = jobs_of(config)

    states, most, busy = _wait_and_watch(cluster, list(jobs.values()))

    named = {name: states[number] for name, number in jobs.items()}
    assert named.pop("train-broken") == "FAILED"
    assert named.pop("eval-broken") == "CANCELLED"
    assert set(named.values()) == {"COMPLETED"}
    assert (most, busy > 1) == (1, True)
    assert _compared(tmp_path / "run") == list(EXPERIMENTS)
    again = verb("submit", "--config", config, "--set", "slurm.setup=[]", "--dry-run")
    assert again.out.endswith("1. train-broken\n2. eval-broken, after train-broken\n3. compare, after eval-broken\n")


@pytest.mark.soak
def test_five_experiments_in_one_allocation(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = _config(job_config, features, experiments="allocation", train={"gpus": 4})
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    assert submitted.out.startswith("1. experiments\n2. compare, after experiments\n")
    jobs = jobs_of(config)
    most_busy = 0

    def longest_runs() -> bool:
        nonlocal most_busy
        most_busy = max(most_busy, len(_gpus_in_use(cluster)))
        return "last: step " in verb("status", "--config", config).out

    # Asked to stop in the midst of it, it goes on with what is missing.
    cluster.until(longest_runs, "the longest one runs")
    cluster.client("scancel", "--signal=USR1", "--batch", jobs["experiments"])
    assert most_busy == 4
    cluster.until(lambda: cluster.show(jobs["experiments"], "Restarts") == "1", "it goes back into the queue")

    states, most, _ = _wait_and_watch(cluster, list(jobs.values()))

    assert states == dict.fromkeys(jobs.values(), "COMPLETED")
    assert most == 1
    assert _compared(tmp_path / "run") == list(EXPERIMENTS)
    assert verb("submit", "--config", config).out == "nothing to do: everything is finished\n"
