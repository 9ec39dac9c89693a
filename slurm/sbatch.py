"""Readable job scripts: what SLURM is asked for, the set-up, and one command that a person can run by hand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.arrays import render_tasks
from slurm.config import JobConfig, SlurmConfig
from slurm.errors import SlurmError
from slurm.times import slurm_time

# torchrun dies of USR1, its worker processes turn it into a checkpoint: so it is ignored from before torchrun starts.
_IGNORING_USR1 = ("bash", "-c", 'trap "" USR1; exec "$@"', "torchrun")
_ALLOWED_IN_NAMES = "-_.+"


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A word of a command that the shell is to expand, e.g. `"$SLURM_ARRAY_TASK_ID"`; never made of a user's text."""

    text: str


Word = str | Verbatim
ARRAY_TASK = Verbatim('"$SLURM_ARRAY_TASK_ID"')


@dataclass(frozen=True, slots=True)
class Script:
    """A job to be.

    Attributes:
        name: letters, digits and -_.+ only.
        purpose: what it does, for people; of the same kind of text, with blanks.
        command: the console line.
        asks: the job's own resources.
        nodes: each runs a task.
        tasks: of a job array; None for a single job.
        max_running: of an array's tasks.
        stops_on_signal: the command stops at a safe point on USR1 and goes on when it is started again.
        processes_per_node: above 1, or with several nodes, the command is started by torchrun.
    """

    name: str
    purpose: str
    command: tuple[Word, ...]
    asks: JobConfig
    nodes: int = 1
    tasks: tuple[int, ...] | None = None
    max_running: int | None = None
    stops_on_signal: bool = False
    processes_per_node: int = 1

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.nodes * self.processes_per_node > 1

    @property
    def log_name(self) -> str:
        """With SLURM's patterns for the numbers of job and task."""
        return f"{self.name}.{'%j' if self.tasks is None else '%A_%a'}.log"


def render(script: Script, settings: SlurmConfig, *, logs: Path, workdir: Path, path: Path) -> str:
    """The text of a job script.

    Args:
        logs: absolute folder for the job's output.
        workdir: absolute folder that the command runs in.
        path: absolute folder with the `pipeline` program; goes in front of PATH, before modules and set-up.

    Raises:
        SlurmError: a path cannot stand in an #SBATCH line.
    """
    _check_name(script)
    options = "".join(f"#SBATCH {option}\n" for option in _options(script, settings, logs))
    setup = "".join(f"{line}\n" for line in _setup(script, settings, workdir, path))
    # The signal of a job with one process goes to the script's own process, which the command therefore takes over.
    command = f"exec {shell_line(_launched(script, settings))}"
    shell = "#!/bin/bash -l" if settings.modules else "#!/bin/bash"
    return f"{shell}\n# {script.purpose}\n{options}\n{setup}\n{command}\n"


def shell_line(words: Sequence[Word]) -> str:
    """A command as a line of bash; every word arrives as it is."""
    return " ".join(word.text if isinstance(word, Verbatim) else shlex.quote(word) for word in words)


def sbatch_value(value: str) -> str:
    """A value as sbatch reads it from an #SBATCH line: it unquotes as a shell does, and drops backslashes.

    Raises:
        SlurmError: it holds what cannot be written there.
    """
    if any(not char.isprintable() for char in value) or "\\" in value:
        raise SlurmError(
            f"{value!r} cannot stand in an #SBATCH line, which knows no line breaks, control characters or backslashes",
            do="choose another name or folder",
        )
    return shlex.quote(value)


def _options(script: Script, settings: SlurmConfig, logs: Path) -> list[str]:
    asks = script.asks
    cpus = asks.cpus_per_task or settings.cpus_per_task
    options: dict[str, str | int | None] = {
        "job-name": script.name,
        # In a file name SLURM replaces %j and the like.
        "output": f"{str(logs).replace('%', '%%')}/{script.log_name}",
        "open-mode": "append",
        "partition": asks.partition or settings.partition,
        "account": settings.account,
        "qos": asks.qos or settings.qos,
        "constraint": asks.constraint or settings.constraint,
        "nodes": script.nodes,
        "ntasks-per-node": 1,
        "gres": _gpus(asks, settings),
        "cpus-per-task": cpus,
        "mem": asks.mem or settings.mem,
        "time": slurm_time(asks.seconds),
        "array": render_tasks(script.tasks, script.max_running) if script.tasks is not None else None,
    }
    lines = [f"--{name}={sbatch_value(str(value))}" for name, value in options.items() if value is not None]
    if script.stops_on_signal:
        # B: to the script's process alone; without it to all processes of the steps that srun starts.
        lines.append(f"--signal={'' if script.distributed else 'B:'}USR1@{settings.signal_seconds}")
    return [*lines, "--requeue", *settings.sbatch]


def _gpus(asks: JobConfig, settings: SlurmConfig) -> str | None:
    kind = asks.gpu_type or settings.gpu_type
    return ":".join(["gpu", *([kind] if kind else []), str(asks.gpus)]) if asks.gpus else None


def _setup(script: Script, settings: SlurmConfig, workdir: Path, path: Path) -> list[str]:
    lines = ["set -e", f"cd {shlex.quote(str(workdir))}", f'export PATH={shlex.quote(str(path))}:"$PATH"']
    lines += [f"module load {shlex.quote(module)}" for module in settings.modules]
    lines += settings.setup
    if script.stops_on_signal:
        lines.append("# Told to stop by USR1, the command goes back into the queue, at most so many times.")
        lines.append(f"export PIPELINE_MAX_REQUEUES={settings.max_requeues}")
    if script.distributed:
        lines.append('head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
    return lines


def _launched(script: Script, settings: SlurmConfig) -> tuple[Word, ...]:
    if not script.distributed:
        return script.command
    cpus = script.asks.cpus_per_task or settings.cpus_per_task
    return (
        "srun",
        "--kill-on-bad-exit=1",
        *([f"--cpus-per-task={cpus}"] if cpus else []),  # srun does not take over sbatch's
        *_IGNORING_USR1,
        "torchrun",
        f"--nnodes={script.nodes}",
        f"--nproc-per-node={script.processes_per_node}",
        "--rdzv-backend=c10d",
        Verbatim('--rdzv-id="$SLURM_JOB_ID"'),
        # Below the ports that the kernel hands to clients, which begin at 32768.
        Verbatim('--rdzv-endpoint="$head_node:$((20000 + SLURM_JOB_ID % 12000))"'),
        "--no-python",
        *script.command,
    )


def _check_name(script: Script) -> None:
    for text, more in ((script.name, ""), (script.purpose, " `,:")):
        if not all(char.isascii() and (char.isalnum() or char in _ALLOWED_IN_NAMES + more) for char in text):
            raise ValueError(f"{text!r} is not for a script")
