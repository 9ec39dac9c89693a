"""`pipeline plan` against what then happens, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .cluster import Cluster
from .conftest import jobs_of

STEPS = 80


def _ran(cluster: Cluster, job: str) -> tuple[datetime, datetime]:
    """When a job (of an array the one task that it has) began and ended; whole seconds."""
    begin, end = (datetime.fromisoformat(cluster.show(job, field)) for field in ("StartTime", "EndTime"))
    return begin, end


def test_the_predicted_time_of_a_chain_is_within_a_quarter_of_what_it_takes(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], capsys: Any
) -> None:
    config = job_config(
        train={"max_steps": STEPS, "effective_batch_size": 32, "eval_split": "val", "eval_steps": STEPS // 2},
        eval={"limit": None},
        slurm={"cache": {"num_parts": 1}, "signal_seconds": 5, "train": {"time": "10m"}},
    )
    planned = verb("plan", "--config", config, "--calibrate", "--calibration-steps", 16, "--json")
    assert planned.code == 0, planned.err
    predicted = json.loads(planned.out)

    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    ids = jobs_of(config)
    states = cluster.wait(list(ids.values()))

    assert set(states.values()) == {"COMPLETED"}
    assert list(predicted["jobs"]) == list(ids)
    times = {name: _ran(cluster, number) for name, number in ids.items()}
    took = {name: (end - begin).total_seconds() for name, (begin, end) in times.items()}
    whole = (max(end for _, end in times.values()) - min(begin for begin, _ in times.values())).total_seconds()
    expected = {name: job["seconds"]["likely"] for name, job in predicted["jobs"].items()}
    summed = sum(took.values())
    with capsys.disabled():
        print(f"\npredicted {expected}, whole {predicted['whole']['seconds']}\ntook {took}, whole {whole}")
    assert abs(sum(expected.values()) - summed) <= 0.25 * summed, (expected, took)
    assert abs(predicted["whole"]["seconds"]["likely"] - whole) <= 0.25 * whole, (predicted["whole"], whole)
    assert predicted["fits"] is True
