"""`pipeline plan` against what then happens, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of


def _ran(cluster: Cluster, job: str) -> tuple[datetime, datetime]:
    """When a job (of an array the one task that it has) began and ended; whole seconds."""
    begin, end = (datetime.fromisoformat(cluster.show(job, field)) for field in ("StartTime", "EndTime"))
    return begin, end


def _predicted(verb: Callable[..., Any], config: Path) -> dict[str, Any]:
    """What a calibration at this moment makes of the chain."""
    planned = verb("plan", "--config", config, "--calibrate", "--calibration-steps", 16, "--json")
    assert planned.code == 0, planned.err
    found: dict[str, Any] = json.loads(planned.out)
    return found


@pytest.mark.soak
@pytest.mark.alone
def test_the_predicted_time_of_a_chain_is_within_a_quarter_of_what_it_takes(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path]
) -> None:
    config = job_config(
        train={"max_steps": 120, "effective_batch_size": 32, "eval_split": "val", "eval_steps": 60},
        eval={"limit": None},
        slurm={"cache": {"num_parts": 1}, "signal_seconds": 5, "train": {"time": "10m"}},
    )
    # Two caching jobs at once would share this machine's cores with whatever else runs here.
    assert verb("cache", "--config", config, "--split", "val").code == 0
    predicted = _predicted(verb, config)
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    ids = jobs_of(config)
    states = cluster.wait(list(ids.values()))

    assert set(states.values()) == {"COMPLETED"}
    assert list(predicted["jobs"]) == list(ids)
    assert predicted["fits"] is True
    times = {name: _ran(cluster, number) for name, number in ids.items()}
    took = {name: (end - begin).total_seconds() for name, (begin, end) in times.items()}
    whole = (max(end for _, end in times.values()) - min(begin for begin, _ in times.values())).total_seconds()

    likely = {name: job["seconds"]["likely"] for name, job in predicted["jobs"].items()}
    likely_whole = predicted["whole"]["seconds"]["likely"]
    print(f"predicted {likely}, whole {likely_whole}; took {took}, whole {whole}")
    assert 0.75 * sum(took.values()) <= sum(likely.values()) <= 1.25 * sum(took.values())
    assert 0.75 * whole <= likely_whole <= 1.25 * whole
