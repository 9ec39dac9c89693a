"""What sbatch is given: jobs to wait for that SLURM knows, and the environment of the submission."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slurm import client
from slurm.client import SlurmClient
from slurm.errors import SlurmError

from .cluster import Cluster


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
    # Nor does it mind a task that its array does not have; one that it has forgotten is no other.
    array = cluster.client("sbatch", "--parsable", "--array=0-1", str(script)).strip()
    with pytest.raises(SlurmError, match=rf"after job {array}_2, which SLURM does not know(.|\n)*submit` again"):
        SlurmClient().submit(script, after_ok=[f"{array}_[0-2]"])
    assert SlurmClient().jobs("987654") == []


def test_a_job_has_the_environment_of_the_submission_and_nothing_of_ours(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sh"
    words = '"$LC_ALL/$MINE/$SLURM_TIME_FORMAT/$SLURM_BITSTR_LEN"'
    script.write_text(f"#!/bin/bash\n#SBATCH --output={tmp_path}/log\necho {words}\n")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("MINE", "ö")

    job = SlurmClient().submit(script)

    assert cluster.wait([job]) == {job: "COMPLETED"}
    assert (tmp_path / "log").read_text(encoding="utf-8") == "C.UTF-8/ö//\n"


def test_a_busy_controller_is_asked_again(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller under load drops connections; here a program in front of the real one does, the first two times."""
    real = shutil.which("scontrol")
    fake = tmp_path / "scontrol"
    fake.write_text(
        f"#!/bin/bash\necho asked >> {tmp_path}/log\n"
        f"if [ $(wc -l < {tmp_path}/log) -lt 3 ]; then\n"
        "  echo 'slurm_load_jobs error: Zero Bytes were transmitted or received' >&2; exit 1\nfi\n"
        f'exec {real} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(client, "_ASK_AGAIN_SECONDS", (0.0, 0.0))

    assert SlurmClient().jobs("987654") == []
    assert (tmp_path / "log").read_text().count("asked") == 3

    (tmp_path / "log").unlink()
    monkeypatch.setattr(client, "_ASK_AGAIN_SECONDS", (0.0,))
    with pytest.raises(SlurmError, match="Zero Bytes"):
        SlurmClient().jobs("987654")
