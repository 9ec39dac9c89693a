"""`pipeline submit` again while a part of the cache has failed and others are still at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of


@pytest.mark.timeout(900)
def test_the_missing_part_is_submitted_and_what_follows_waits_for_it_and_for_those_at_work(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path
) -> None:
    # Part 1 fails as long as there is no file `mended`; parts 0 and 2 work until there is a file `go`.
    fails = f'[ "$SLURM_JOB_NAME $SLURM_ARRAY_TASK_ID" != "cache-train 1" ] || cat {tmp_path}/mended'
    works = f'until [ "$SLURM_ARRAY_TASK_ID" = 1 ] || [ -e {tmp_path}/go ]; do sleep 0.2; done'
    config = job_config(slurm={"cache": {"num_parts": 3}, "setup": [fails, works]})
    assert verb("submit", "--config", config).code == 0
    old = jobs_of(config)
    cluster.until(
        lambda: cluster.state(old["cache-train"]) == "RUNNING FAILED RUNNING",
        "part 1 has failed beside the others",
        now=lambda: cluster.state(old["cache-train"]),
    )
    (tmp_path / "mended").write_text("")

    again = verb("submit", "--config", config)

    assert again.code == 0, again.err
    assert f"1. cache-train, 1 tasks besides {old['cache-train']}_[0,2]\n2. check, after cache-train, " in again.out
    new = jobs_of(config)
    assert new["cache-val"] == old["cache-val"]
    waits = cluster.show(new["check"], "Dependency").replace("(unfulfilled)", "").split(",")
    for task in (0, 2):
        assert f"afterok:{old['cache-train']}_{task}" in waits
    # Not for the array with the failed part, which would never let it start.
    assert [wait for wait in waits if wait.startswith(f"afterok:{old['cache-train']}_*")] == []
    replaced = [old[name] for name in ("check", "train", "eval")]
    assert cluster.wait(replaced) == dict.fromkeys(replaced, "CANCELLED")
    assert "already queued" in verb("submit", "--config", config).out  # and nothing is submitted twice
    assert jobs_of(config) == new

    (tmp_path / "go").write_text("")
    left = [new["cache-train"], new["check"]]
    assert cluster.wait(left) == dict.fromkeys(left, "COMPLETED")
    assert cluster.state(old["cache-train"]) == "COMPLETED FAILED COMPLETED"


def test_splits_with_images_in_common_wait_for_one_another(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], screenshots: Path
) -> None:
    train = str(screenshots / "train.jsonl")
    config = job_config(data={"splits": {"train": train, "val": train}}, slurm={"sbatch": ["--hold"]})

    assert verb("submit", "--config", config).code == 0

    jobs = jobs_of(config)
    assert cluster.show(jobs["cache-val"], "Dependency") == f"afterany:{jobs['cache-train']}_*(unfulfilled)"
    assert cluster.show(jobs["cache-train"], "Dependency") == "(null)"
    cluster.client("scancel", f"{jobs['cache-train']}_1")
    assert verb("submit", "--config", config).code == 0
    again = jobs_of(config)
    waits = [f"afterany:{jobs['cache-val']}_{task}(unfulfilled)" for task in (0, 1)]
    assert cluster.show(again["cache-train"], "Dependency").split(",") == waits
