"""`pipeline status` of work that was done otherwise than by its job, and of parts whose images others have cached."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.chain_progress import PartsProgress, parts_progress
from pipeline.chain_record import Chain, ChainFolder, SubmittedJob

from .cluster import Cluster
from .conftest import jobs_of


def _lines(text: str) -> dict[str, str]:
    """Name of a job -> what is said behind its number."""
    rows = [line.split(maxsplit=2) for line in text.splitlines()[1:] if not line.startswith(" ")]
    return {name: told for name, _, told in rows}


def test_work_that_was_done_by_hand_is_finished_though_its_job_was_cancelled(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path]
) -> None:
    config = job_config(slurm={"sbatch": ["--hold"]})
    assert verb("submit", "--config", config).code == 0
    assert verb("cancel", "--config", config).code == 0
    cluster.wait(list(jobs_of(config).values()))
    cancelled = _lines(verb("status", "--config", config).out)
    assert cancelled["cache-train"] == "2 CANCELLED"
    assert "finished" not in " ".join(cancelled.values())

    assert verb("cache", "--config", config, "--split", "train").code == 0
    half = verb("status", "--config", config).out
    told = _lines(half)
    assert told["cache-train"] == "finished; the job itself: 2 CANCELLED"
    assert told["cache-val"] == "2 CANCELLED"
    assert told["check"].startswith("CANCELLED")
    assert "12 of 12 images of the split are committed" in half
    # The 12 are not those of val.
    assert half.split("cache-val")[1].splitlines()[1] == "    the images of the split are not counted yet"

    assert verb("cache", "--config", config, "--split", "val").code == 0
    assert verb("train", "--config", config, "--from-cache").code == 0
    told = _lines(verb("status", "--config", config).out)
    assert [told[name].split("  ")[0] for name in ("cache-val", "check", "train")] == [
        "finished; the job itself: 2 CANCELLED",
        "finished; the job itself: CANCELLED",
        "finished; the job itself: CANCELLED",
    ]
    assert told["eval"].startswith("CANCELLED")

    assert verb("eval", "--config", config).code == 0
    everything = verb("status", "--config", config).out
    assert [line for line in _lines(everything).values() if not line.startswith("finished; ")] == []
    assert " CANCELLED (" not in everything  # no failure is told of what is finished


def test_finished_work_of_jobs_that_slurm_has_forgotten(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = job_config(cache={"dir": str(features)})
    common: dict[str, Any] = {"tasks": None, "log": "%j.log", "time_limit": 60}
    jobs = (
        SubmittedJob(name="check", id="987653", **common),
        SubmittedJob(name="train", id="987654", folder=".", **common),
        SubmittedJob(name="train-of+a-stage-that-is-in-the-file-no-more", id="987655", folder=".", **common),
    )
    folder = ChainFolder(tmp_path / "run")
    with folder.submitting():
        folder.save(Chain(workdir=str(tmp_path), cache=str(features), num_parts=2, jobs=jobs))

    told = list(_lines(verb("status", "--config", config).out).values())

    left = f"SLURM does not know it any more; `pipeline submit --config {config}` does what is left of it"
    assert told == ["finished; SLURM does not know the job any more", left, left]


def test_states_are_told_though_the_data_is_gone(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = job_config(slurm={"sbatch": ["--hold"]})
    assert verb("submit", "--config", config).code == 0
    assert verb("cancel", "--config", config).code == 0
    cluster.wait(list(jobs_of(config).values()))

    status = verb("status", "--config", config, "--set", f"model={tmp_path}/gone")

    assert status.code == 0, status.err
    assert _lines(status.out)["cache-train"] == "2 CANCELLED"
    assert "\nwhat is finished cannot be told: " in status.out


def test_parts_that_were_all_submitted_again_are_not_shown(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = job_config()
    jobs = [
        SubmittedJob(name="cache-train", id=number, tasks=tasks, log="%A_%a.log", split="train", time_limit=60)
        for number, tasks in (("987653", (0, 1)), ("987654", (1,)), ("987655", (0,)))
    ]
    folder = ChainFolder(tmp_path / "run")
    with folder.submitting():
        folder.save(Chain(workdir=str(tmp_path), cache=str(features), num_parts=2, jobs=tuple(jobs)))

    shown = verb("status", "--config", config).out

    assert ("987653" in shown, "987654" in shown, "987655" in shown) == (False, True, True)


def test_the_pace_of_a_part_is_that_of_what_was_committed_since_it_started() -> None:
    started = datetime(2026, 1, 1, 12)
    before, after = started - timedelta(hours=1), started + timedelta(minutes=5)
    # 60 of 100 images were there: another split has them too.
    progress = PartsProgress(((80, 100),), ((before, (60,)), (after, (20,))), started + timedelta(minutes=10))

    assert progress.end_of(0, started) == started + timedelta(minutes=20)
    assert progress.end_of(0, after + timedelta(minutes=1)) is None


def test_parts_are_counted_by_the_split_alone(features: Path) -> None:
    (cache,) = (path.parent for path in features.glob("*/shards"))
    for split, total in (("train", 12), ("val", 2)):
        progress = parts_progress(cache, split, 3)
        assert progress is not None
        assert (sum(done for done, _ in progress.parts), sum(every for _, every in progress.parts)) == (total, total)
        assert [done for done, _ in progress.parts] == [
            sum(part) for part in zip(*(c for _, c in progress.commits), strict=True)
        ]
