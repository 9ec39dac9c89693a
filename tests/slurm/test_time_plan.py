"""`pipeline plan` against what then happens, on a real cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from .cluster import Cluster
from .conftest import jobs_of


def _ran(cluster: Cluster, job: str) -> tuple[datetime, datetime]:
    """When a job (of an array the one task that it has) began and ended; whole seconds."""
    begin, end = (datetime.fromisoformat(cluster.show(job, field)) for field in ("StartTime", "EndTime"))
    return begin, end


def _predicted(verb: Callable[..., Any], config: Path, *options: str) -> dict[str, Any]:
    """What a calibration at this moment makes of the chain."""
    planned = verb("plan", "--config", config, "--calibrate", "--calibration-steps", 16, "--json", *options)
    assert planned.code == 0, planned.err
    found: dict[str, Any] = json.loads(planned.out)
    return found


def _within_a_quarter(predictions: list[float], took: float) -> bool:
    return 0.75 * took <= max(predictions) and min(predictions) <= 1.25 * took


def test_the_predicted_time_of_a_chain_is_within_a_quarter_of_what_it_takes(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = job_config(
        train={"max_steps": 120, "effective_batch_size": 32, "eval_split": "val", "eval_steps": 60},
        eval={"limit": None},
        slurm={"cache": {"num_parts": 1}, "signal_seconds": 5, "train": {"time": "10m"}},
    )
    # Two caching jobs at once would share this machine's cores with whatever else runs here.
    assert verb("cache", "--config", config, "--split", "val").code == 0
    predicted = [_predicted(verb, config)]
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    ids = jobs_of(config)
    states = cluster.wait(list(ids.values()))

    assert set(states.values()) == {"COMPLETED"}
    assert list(predicted[0]["jobs"]) == list(ids)
    assert predicted[0]["fits"] is True
    times = {name: _ran(cluster, number) for name, number in ids.items()}
    took = {name: (end - begin).total_seconds() for name, (begin, end) in times.items()}
    whole = (max(end for _, end in times.values()) - min(begin for begin, _ in times.values())).total_seconds()

    def hold() -> bool:
        sums = [sum(job["seconds"]["likely"] for job in one["jobs"].values()) for one in predicted]
        wholes = [one["whole"]["seconds"]["likely"] for one in predicted]
        likely = [{name: job["seconds"]["likely"] for name, job in one["jobs"].items()} for one in predicted]
        print(f"predicted {likely}, whole {wholes}; took {took}, whole {whole}")
        return _within_a_quarter(sums, sum(took.values())) and _within_a_quarter(wholes, whole)

    if not hold():
        # Other work on this machine may have come or gone since. Then a calibration now differs from the one before,
        # and the time that it took lies between what the two predict, or within a quarter of one of them.
        predicted.append(_predicted(verb, config, "--set", f"output_dir={tmp_path / 'again'}"))
    assert hold(), ([one["jobs"] for one in predicted], took, [one["whole"] for one in predicted], whole)
