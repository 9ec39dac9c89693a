"""Jobs tied to one another: which follow which, which are in the queue already, and submitting the rest in order."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurm.client import SlurmClient
from slurm.errors import SlurmError
from slurm.sbatch import Script

# SLURM kills 30 s (its KillWait) after it has told a job to end.
TAKE_BACK_SECONDS = 60


@dataclass(frozen=True, slots=True)
class ChainJob:
    """A job of a chain. Names of jobs that are not in the chain stand for work that is finished.

    Attributes:
        after_ok: names of the jobs that must have ended well.
        after_any: names of the jobs that must have ended.
    """

    script: Script
    after_ok: tuple[str, ...] = ()
    after_any: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the script."""
        return self.script.name


def describe(jobs: Sequence[ChainJob], queued: Mapping[str, Sequence[str]]) -> str:
    """The order, for people.

    Args:
        queued: name -> jobs that are in the queue already, as in `12` or `12_[0,3]`.
    """
    new = {job.name for job in jobs}
    lines = [f"{name}: already queued as {', '.join(ids)}" for name, ids in queued.items() if name not in new]
    for number, job in enumerate(jobs, 1):
        tasks = "" if job.script.tasks is None else f", {len(job.script.tasks)} tasks"
        if job.name in queued:
            tasks += f" besides {', '.join(queued[job.name])}"
        after = [name for name in (*job.after_ok, *job.after_any) if name in new or name in queued]
        lines.append(f"{number}. {job.name}{tasks}{', after ' if after else ''}{', '.join(after)}")
    return "\n".join(lines)


def submit_chain(
    jobs: Sequence[ChainJob],
    queued: Mapping[str, Sequence[str]],
    *,
    script_file: Callable[[str], Path],
    client: SlurmClient,
    submitted: Callable[[ChainJob, str], None],
    setting: Callable[[ChainJob, str], str],
) -> None:
    """Submit jobs in their order, each tied to those before it.

    Args:
        queued: name -> jobs that are in the queue already, as in `12` or `12_[0,3]`; a job may wait for these.
        script_file: where the script of a name lies.
        submitted: called with a job and its number at once, so that nothing is forgotten when a later one is refused.
        setting: of a job and a name such as `mem` the key that gave it.

    Raises:
        SlurmError: SLURM refused one; those before it are in the queue.
    """
    ids = {name: list(numbers) for name, numbers in queued.items()}

    def numbers(names: Sequence[str]) -> list[str]:
        return [number for name in names for number in ids.get(name, [])]

    for job in jobs:
        number = client.submit(
            script_file(job.name),
            after_ok=numbers(job.after_ok),
            after_any=numbers(job.after_any),
            setting=partial(setting, job),
        )
        submitted(job, number)
        ids.setdefault(job.name, []).append(number)


def take_back(numbers: Sequence[str], client: SlurmClient) -> list[str]:
    """Cancel jobs and wait until they have ended, so that none works on when it is submitted anew.

    Returns:
        Those that have not ended in time.

    Raises:
        SlurmError: they cannot be cancelled.
    """
    client.cancel(numbers)
    end = time.monotonic() + TAKE_BACK_SECONDS
    left = list(numbers)
    while left := [number for number in left if any(info.active for info in client.jobs(number))]:
        if time.monotonic() > end:
            break
        time.sleep(0.5)
    return left


def check_setup(lines: Sequence[str]) -> None:
    """Refuse set-up lines that would take the command behind them into a string, a here-document or a block.

    Raises:
        SlurmError: a line is not a whole one for bash.
    """
    for line in lines:
        done = subprocess.run(("/bin/bash", "-n"), input=f"{line}\n", capture_output=True, text=True, check=False)
        if done.returncode or done.stderr:
            raise SlurmError(
                f"slurm.setup: {line!r} is not a whole line of bash: {done.stderr.strip().splitlines()[0]}",
                do="write each item of slurm.setup so that it can stand alone",
            )
