"""What SLURM refuses, what it takes though it should not, and no SLURM at all: a clear message each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cache.progress import Silent
from pipeline.chain_record import Chain, ChainFolder, SubmittedJob, differences, only_for_new_jobs, snapshot
from pipeline.chain_status import failure_lines
from pipeline.chain_submit import submit
from pipeline.config_file import load_config
from slurm.client import JobInfo, SlurmClient
from slurm.errors import SlurmError

from .cluster import Cluster
from .conftest import jobs_of


@pytest.mark.parametrize(
    ("slurm", "words", "advice"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope", "set slurm.partition to one of: debug, urgent"),
        ({"mem": "900G"}, "Memory specification can not be satisfied", "lower slurm.mem; "),
        ({"train": {"mem": "900G"}}, "Memory specification can not be satisfied", "lower slurm.train.mem; "),
        (
            {"train": {"gpus": 9}},
            "Requested node configuration is not available",
            "ask for less: slurm.train.gpus, slurm.gpu_type, slurm.cpus",
        ),
        (
            {"gpu_type": "h100", "eval": {"gpu_type": "a100"}},
            "Requested node configuration is not available",
            "ask for less: slurm.train.gpus, slurm.gpu_type, slurm.cpus",
        ),
        ({"sbatch": ["--reservation=none"]}, "Requested reservation is invalid", "correct the setting of `slurm:`"),
    ],
)
def test_sbatch_refuses(
    cluster: Cluster,
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    features: Path,
    slurm: dict[str, Any],
    words: str,
    advice: str,
) -> None:
    config = job_config(cache={"dir": str(features)}, slurm=slurm)

    refused = verb("submit", "--config", config)

    assert refused.code == 6
    assert "\nerror: sbatch refused train.sbatch. SLURM says:\n    " in refused.err
    assert words in refused.err
    assert f"\n  Nothing of this submission is left in the queue.\n  What to do: {advice}" in refused.err
    assert cluster.client("squeue", "-h") == ""


def test_a_refusal_half_way_leaves_nothing_in_the_queue_and_the_record_as_it_was(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = job_config(cache={"dir": str(features)}, slurm={"sbatch": [f"--nodelist={cluster.nodes[0]}"]})
    record = tmp_path / "run" / "slurm"

    refused = verb("submit", "--config", config, "--set", "slurm.eval.partition=nope")

    assert refused.code == 6
    assert "sbatch refused eval.sbatch" in refused.err
    assert "\n  Nothing of this submission is left in the queue. The jobs before it were cancelled: " in refused.err
    assert "What to do: set slurm.eval.partition to one of: debug, urgent" in refused.err
    assert cluster.client("squeue", "-h") == ""
    assert not (record / "jobs.json").exists()
    assert not (record / "config.yaml").exists()

    # With a job of an earlier submission in the queue, that one stays, and its record too.
    begin = ["--set", 'slurm.sbatch=["--begin=now+1hour"]']
    assert verb("submit", "--config", config, *begin).code == 0
    jobs = jobs_of(config)
    cluster.client("scancel", jobs["eval"])
    before = {name: (record / name).read_text() for name in ("jobs.json", "config.yaml")}
    again = verb("submit", "--config", config, *begin, "--set", "slurm.eval.gpus=9")
    assert again.code == 6
    assert "Nothing of this submission is left in the queue.\n" in again.err
    assert "What to do: ask for less: slurm.eval.gpus, " in again.err
    assert {name: (record / name).read_text() for name in before} == before
    assert cluster.state(jobs["train"]) == "PENDING"

    mended = verb("submit", "--config", config, *begin, "--set", "slurm.eval.mem=2G")
    assert mended.code == 0, mended.err
    assert "not for those in the queue:\n    slurm.eval.mem: 'not set' there, '2G' now\n" in mended.out
    assert jobs_of(config)["train"] == jobs["train"]
    assert cluster.show(jobs_of(config)["eval"], "MinMemoryNode") == "2G"
    assert verb("cancel", "--config", config).code == 0


def test_a_waiting_job_is_replaced_only_when_its_replacement_was_taken(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = job_config(cache={"dir": str(features)}, slurm={"sbatch": ["--hold"]})
    assert verb("submit", "--config", config).code == 0
    # As after a failure of training that SLURM has forgotten, with an evaluation that waits for it in vain.
    folder, old = ChainFolder(tmp_path / "run"), jobs_of(config)["eval"]
    chain = folder.load()
    assert chain is not None
    folder.save(chain.model_copy(update={"jobs": chain.jobs[1:]}))

    refused = verb("submit", "--config", config, "--set", "slurm.eval.partition=nope")
    assert refused.code == 6
    assert cluster.state(old) == "PENDING"
    assert jobs_of(config) == {"eval": old}

    assert verb("submit", "--config", config).code == 0
    assert cluster.state(old) == "CANCELLED"
    after = folder.load()
    assert after is not None
    assert [job.name for job in after.jobs] == ["train", "eval"]
    assert old not in jobs_of(config).values()


class _CannotCancel(SlurmClient):
    def cancel(self, jobs: Sequence[str]) -> None:
        if jobs:
            raise SlurmError("scancel failed", do="ask")


def test_jobs_that_cannot_be_taken_back_are_named_and_stay_in_the_record(
    cluster: Cluster, job_config: Callable[..., Path], features: Path
) -> None:
    config = job_config(cache={"dir": str(features)}, slurm={"sbatch": ["--hold"], "eval": {"partition": "nope"}})

    with pytest.raises(SlurmError) as refused:
        submit(load_config(config), Silent(), _CannotCancel(), dry_run=False)

    train = jobs_of(config)["train"]
    assert f"Jobs of this submission are left in the queue: {train} (scancel failed)" in str(refused.value)
    assert "run `pipeline cancel`, which ends them; then set slurm.eval.partition to" in str(refused.value)
    assert cluster.state(train) == "PENDING"


@pytest.mark.parametrize(
    ("sets", "refused"),
    [
        (["slurm.mem=2G", "slurm.train.time=2h", "slurm.eval.partition=urgent", "slurm.setup=[date]"], []),
        (["slurm.cpus_per_task=2", "slurm.train.gpus=2", "slurm.signal_seconds=5"], []),
        (["slurm.mem=2G", "slurm.cache.num_parts=3"], ["slurm.cache.num_parts"]),
        (["slurm.experiments=allocation"], ["slurm.experiments"]),
        (["train.max_steps=5", "slurm.mem=2G"], ["train.max_steps"]),
    ],
)
def test_what_may_change_while_jobs_are_queued(
    job_config: Callable[..., Path], sets: list[str], refused: list[str]
) -> None:
    before, now = (snapshot(load_config(job_config(), overrides)) for overrides in ([], sets))

    changed = differences(before, now)

    assert len(changed) == len(sets)
    assert [key for key in changed if not only_for_new_jobs(key)] == refused


@pytest.mark.parametrize(
    ("job", "slurm", "advice"),
    [
        ({"name": "train", "folder": "."}, {}, "raise slurm.mem or slurm.train.mem"),
        ({"name": "experiments"}, {"train": {"mem": "2G"}}, "raise slurm.train.mem"),
        ({"name": "cache-val", "split": "val"}, {"mem": "1G"}, "raise slurm.mem or slurm.cache.mem"),
        ({"name": "check"}, {"light": {"mem": "1G"}}, "raise slurm.light.mem"),
        ({"name": "eval-a"}, {"train": {"mem": "1G"}}, "raise slurm.mem or slurm.eval.mem"),
    ],
)
def test_what_to_do_about_a_job_without_enough_memory(
    job_config: Callable[..., Path], tmp_path: Path, job: dict[str, Any], slurm: dict[str, Any], advice: str
) -> None:
    ended = SubmittedJob.model_validate({"id": "7", "tasks": None, "log": "%j.log", "time_limit": 60, **job})
    settings = load_config(job_config(slurm=slurm))
    info = JobInfo("7", None, "OUT_OF_MEMORY", "OutOfMemory", exit_code="signal 125")

    assert failure_lines(settings, ChainFolder(tmp_path), ended, info) == [
        "7 OUT_OF_MEMORY (exit code signal 125, it used more memory than it asked for)",
        f"  What to do: {advice}, then run `pipeline submit` again",
    ]


def test_no_controller_answers(
    cluster: Cluster,
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conf = tmp_path / "slurm.conf"
    unreachable = cluster.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 # ")
    conf.write_text(unreachable.replace("MessageTimeout=60", "MessageTimeout=1"))
    monkeypatch.setenv("SLURM_CONF", str(conf))

    config = job_config(cache={"dir": str(features)})
    refused = verb("submit", "--config", config)
    folder = ChainFolder(tmp_path / "run")
    job = SubmittedJob(name="train", id="7", tasks=None, log="train.%j.log", folder=".", time_limit=60)
    folder.save(Chain(workdir=str(tmp_path), cache=str(features), num_parts=2, jobs=(job,)))

    for said in (refused, verb("status", "--config", config)):
        assert said.code == 6
        assert "refused" not in said.err
        assert "Unable to contact slurm controller" in said.err
        assert "What to do: try again when the controller answers" in said.err
    assert "SLURM does not answer: `sbatch` cannot reach its controller. It says:" in refused.err


def test_slurm_is_not_installed(
    verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job_config(cache={"dir": str(features)})
    monkeypatch.setenv("PATH", "/nowhere")

    refused = verb("submit", "--config", config)

    assert refused.code == 6
    assert "refused" not in refused.err
    assert "SLURM was not found: there is no command `sbatch` on PATH here" in refused.err
    assert "run this on a login node of the cluster" in refused.err
    status = verb("status", "--config", config).out
    assert status.startswith("nothing was submitted for")
    assert f"`pipeline submit --config {config}` submits what is not finished\nJobs of slurm/chain.sh," in status
    assert "are not followed: `squeue --me` shows them" in status
    assert verb("cancel", "--config", config).out.startswith("nothing to cancel")


def test_a_dry_run_needs_no_slurm_and_writes_nothing(
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    shown = verb("submit", "--config", job_config(cache={"dir": str(features)}), "--dry-run")

    assert shown.code == 0, shown.err
    assert "#SBATCH --job-name=train" in shown.out
    assert shown.out.endswith("1. train\n2. eval, after train\n")
    assert not (tmp_path / "run").exists()


def test_a_setup_line_that_is_none(verb: Callable[..., Any], job_config: Callable[..., Path]) -> None:
    refused = verb("submit", "--config", job_config(slurm={"setup": ["cat <<EOF"]}))

    assert refused.code == 6
    assert "slurm.setup: 'cat <<EOF' is not a whole line of bash" in refused.err


def test_a_damaged_record(verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "run" / "slurm").mkdir(parents=True)
    (tmp_path / "run" / "slurm" / "jobs.json").write_text('{"version": 1')

    refused = verb("status", "--config", job_config())

    assert refused.code == 2
    assert "jobs.json: is damaged" in refused.err


def test_jobs_that_slurm_has_forgotten_are_no_hindrance(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    config = job_config(cache={"dir": str(features)}, slurm={"sbatch": ["--hold"]})
    forgotten = SubmittedJob(name="train", id="987654", tasks=None, log="train.%j.log", folder=".", time_limit=60)
    folder = ChainFolder(tmp_path / "run")
    with folder.submitting():
        folder.save(Chain(workdir=str(tmp_path), cache=str(features), num_parts=2, jobs=(forgotten,)))

    status = verb("status", "--config", config)
    assert "train                      987654  SLURM does not know it any more" in status.out
    submitted = verb("submit", "--config", config)
    assert submitted.code == 0, submitted.err
    assert jobs_of(config)["train"] != "987654"
    assert cluster.state(jobs_of(config)["train"]) == "PENDING"


def test_two_submissions_at_once(
    verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    with ChainFolder(tmp_path / "run").submitting():
        refused = verb("submit", "--config", job_config(cache={"dir": str(features)}))

    assert refused.code == 2
    assert "another submission is at work" in refused.err


def test_a_file_system_without_locks_is_said_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(_file: Any, _kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("pipeline.chain_record.flock", flock)
    with ChainFolder(tmp_path / "run").submitting():
        assert "keeps no locks (No locks available): do not submit here twice at once" in caplog.text
    monkeypatch.setattr("pipeline.chain_record.flock", lambda *_: os.close(10**6))
    with pytest.raises(OSError, match="Bad file descriptor"), ChainFolder(tmp_path / "run").submitting():
        pass
