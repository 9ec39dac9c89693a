"""What SLURM tells a job by its environment. Nothing else in this project reads SLURM's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# Of a job that a command is typed in (an interactive one), these would become options of the jobs it submits.
_OF_A_JOB = re.compile(r"SLURM(D|_(?!CONF$|CLUSTERS$|TIME_FORMAT$))|SRUN_")


@dataclass(frozen=True, slots=True)
class OwnJob:
    """The job that this process runs in.

    Attributes:
        id: as scontrol takes it; `12_3` for a task of an array, since the plain number may stand for the whole array.
        restarts: how often it was put back into the queue.
    """

    id: str
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> OwnJob | None:
        """None outside SLURM."""
        job = environment.get("SLURM_JOB_ID")
        if job is None:
            return None
        array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        name = f"{array}_{task}" if array and task else job
        return cls(name, int(environment.get("SLURM_RESTART_COUNT") or 0))


def without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without that of the job that this process runs in, for submitting others."""
    return {name: value for name, value in environment.items() if not _OF_A_JOB.match(name)}
