"""What SLURM refuses, what it takes though it should not, and no SLURM at all: a clear message each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.chain_record import Chain, ChainFolder, SubmittedJob
from slurm.client import SlurmClient
from slurm.errors import SlurmError

from .cluster import Cluster
from .conftest import jobs_of


@pytest.mark.parametrize(
    ("slurm", "words", "advice"),
    [
        ({"partition": "nope"}, "invalid partition specified: nope", "set slurm.partition to one of: debug, urgent"),
        ({"mem": "900G"}, "Memory specification can not be satisfied", ""),
        ({"train": {"gpus": 9}}, "Requested node configuration is not available", "ask for less (gpus, cpus_per_task"),
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
    assert f"What to do: {advice}" in refused.err
    assert cluster.client("squeue", "-h") == ""


def test_what_was_submitted_before_a_refusal_is_kept_and_not_submitted_twice(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path
) -> None:
    nodes = ",".join(cluster.nodes)
    slurm = {"sbatch": [f"--nodelist={cluster.nodes[0]}", "--begin=now+1hour"]}
    config = job_config(cache={"dir": str(features)}, slurm={**slurm, "eval": {"gpus": 9}})

    refused = verb("submit", "--config", config)
    assert refused.code == 6
    assert "sbatch refused eval.sbatch" in refused.err
    train = jobs_of(config)["train"]
    changed = verb("submit", "--config", config, "--set", "slurm.eval.gpus=1")
    assert changed.code == 2
    assert "slurm.eval.gpus: 9 there, 1 now" in changed.err
    waiting = verb("status", "--config", config).out
    assert "PENDING  (BeginTime: held back" in waiting
    assert verb("cancel", "--config", config).out == f"cancelled train                    job {train}\n"
    cluster.wait([train])
    mended = verb("submit", "--config", config, "--set", "slurm.eval.gpus=1")
    assert mended.code == 0, mended.err + nodes
    assert list(jobs_of(config)) == ["train", "eval"]
    assert verb("cancel", "--config", config).code == 0


def test_a_job_that_nobody_knows_is_not_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --output=/dev/null\ntrue\n")
    # SLURM itself takes it, and starts the job at once.
    taken = cluster.client("sbatch", "--parsable", "--dependency=afterok:987654", str(script)).strip()
    assert cluster.wait([taken]) == {taken: "COMPLETED"}

    with pytest.raises(SlurmError, match=r"after job 987654, which SLURM does not know"):
        SlurmClient().submit(script, after_ok=["987654"])
    with pytest.raises(SlurmError, match=r"after job 987654, which SLURM does not know"):
        SlurmClient().submit(script, after_any=[taken, "987654"])
    assert SlurmClient().jobs("987654") == []


def test_no_controller_answers(
    cluster: Cluster,
    verb: Callable[..., Any],
    job_config: Callable[..., Path],
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(cluster.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 # ") + "MessageTimeout=1\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))

    refused = verb("submit", "--config", job_config(cache={"dir": str(features)}))

    assert refused.code == 6
    assert "Unable to contact slurm controller" in refused.err
    assert "try again when the controller answers" in refused.err


def test_slurm_is_not_installed(
    verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job_config(cache={"dir": str(features)})
    monkeypatch.setenv("PATH", "/nowhere")

    refused = verb("submit", "--config", config)

    assert refused.code == 6
    assert "`sbatch` is not installed here" in refused.err
    assert "run this on a login node of the cluster" in refused.err
    assert verb("status", "--config", config).out.startswith("nothing was submitted for")
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
    assert "another `pipeline submit` is at work" in refused.err
