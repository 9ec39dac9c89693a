"""The whole chain on a real cluster, in folders with names that a shell would trip over."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .conftest import jobs_of

HOSTILE = 'it\'s a "run" $(touch pwned) `touch pwned` & #1; 100%j ö'


@pytest.mark.timeout(900)
def test_a_chain_stops_at_a_failing_part_and_a_resubmit_finishes_it(
    cluster: Cluster,
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    monkeypatch.chdir(folder)
    # As batch systems and containers often have it; jobs inherit it. Python reads and writes UTF-8 all the same.
    monkeypatch.setenv("LC_ALL", "POSIX")
    # Part 1 of train fails as long as there is no file `mended`.
    trap = f'[ "$SLURM_JOB_NAME" != cache-train ] || [ "$SLURM_ARRAY_TASK_ID" != 1 ] || cat {tmp_path}/mended'
    config = job_config(folder, output_dir="run", slurm={"setup": [trap]})

    first = verb("submit", "--config", config)
    assert first.code == 0, first.err
    assert "4. train, after check" in first.out
    ids = jobs_of(config)
    assert list(ids) == ["cache-train", "cache-val", "check", "train", "eval"]
    early = verb("status", "--config", config).out
    assert "Dependency: waits for the jobs before it" in early

    states = cluster.wait(list(ids.values()))
    assert sorted(states[ids["cache-train"]].split()) == ["COMPLETED", "FAILED"]
    assert [states[ids[name]] for name in ("check", "train", "eval")] == ["CANCELLED"] * 3
    failed = verb("status", "--config", config).out
    assert f"{ids['cache-train']}_1 FAILED (exit code 1, its command failed)" in failed
    assert "| cat: " in failed
    assert "No such file" in failed
    assert f"cache-val                {ids['cache-val']:>8s}  2 COMPLETED" in failed
    assert "2 of 2 images of the split are committed" in failed

    (tmp_path / "mended").write_text("")
    again = verb("submit", "--config", config)
    assert again.code == 0, again.err
    assert "1. cache-train, 1 tasks\n2. check, after cache-train" in again.out
    assert "cache-val" not in again.out
    new = jobs_of(config)
    changed = verb("submit", "--config", config, "--set", "train.learning_rate=1e-3")
    assert changed.code == 2
    assert "train.learning_rate: 0.003 there, 0.001 now" in changed.err
    options = shlex.join(["--config", str(config), "--set=train.learning_rate=1e-3"])
    assert f"run `pipeline cancel {options}` first" in changed.err
    twice = verb("submit", "--config", config)
    assert "submitted" not in twice.out
    assert f"train: already queued as {new['train']}" in twice.out
    states = cluster.wait(list(new.values()))
    assert set(" ".join(states.values()).split()) == {"COMPLETED"}
    logs = sorted(file.name for file in (folder / "run/slurm/logs").glob("cache-train*"))
    assert logs == sorted(
        f"cache-train.{job}_{task}.log"
        for job, task in [(ids["cache-train"], 0), (ids["cache-train"], 1), (new["cache-train"], 1)]
    )

    assert {"exact_match"} <= set(json.loads((folder / "run/eval-val/metrics.json").read_text()))
    assert verb("submit", "--config", config).out == "nothing to do: everything is finished\n"
    finished = verb("status", "--config", config).out
    assert "step 4 of 4" in finished
    assert "FAILED" not in finished  # the part that was done again
    assert verb("cancel", "--config", config).out.startswith("nothing to cancel")
    assert list(tmp_path.rglob("pwned")) == []
