"""Options of sbatch that `slurm.sbatch` must not hold, each with the reason."""

from __future__ import annotations

import re
import shlex

_LOGS = "the logs are found by it"
_ORDER = "the order of the jobs is made of it"
_REQUEUE = "interrupted jobs go on by it"
_ONE_TASK = "each node has one task, which torchrun needs"
_NUMBER = "the number of the job is read from sbatch's answer"
# The chain gives these itself.
_OURS = {
    "array": "each task is a part of the cache",
    "chdir": "relative paths begin where the chain is submitted",
    "dependency": _ORDER,
    "error": _LOGS,
    "job-name": _LOGS,
    "kill-on-invalid-dep": _ORDER,
    "no-requeue": _REQUEUE,
    "ntasks": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "open-mode": _LOGS,
    "output": _LOGS,
    "parsable": _NUMBER,
    "requeue": _REQUEUE,
    "signal": "jobs save their work on it before their time limit",
    "wait": _NUMBER,
    "wrap": "the script has the command",
}
_ENVIRONMENT = (
    "the job, and what srun starts in it, need the environment of the submission; set variables with "
    "slurm.setup: [export NAME=value]"
)
# It gives these to no job, and would not work with them. Tried: --help and --version do nothing in a script.
_BREAKS = {
    "clusters": "the jobs are followed, tied and put back into the queue by their numbers on this cluster; run "
    "`pipeline submit` on a login node of the other one",
    "export": _ENVIRONMENT,
    "export-file": _ENVIRONMENT,
    "get-user-env": _ENVIRONMENT,
    "no-kill": "a job whose node fails has to end, so that it goes back into the queue",
    "test-only": "sbatch would submit nothing",
}
_JOBS = ("cache", "train", "eval", "light")
_TIME, _GPUS = (" or ".join(f"slurm.{job}.{name}" for job in _JOBS) for name in ("time", "gpus"))
_GRES = f"{_GPUS}, and for their type slurm.gpu_type,"
_SETTINGS = {
    "account": "slurm.account",
    "constraint": "slurm.constraint",
    "cpus-per-gpu": "slurm.cpus_per_task",
    "cpus-per-task": "slurm.cpus_per_task",
    "gpus": _GRES,
    "gpus-per-node": _GRES,
    "gpus-per-socket": _GRES,
    "gpus-per-task": _GRES,
    "gres": _GRES,
    "mem": "slurm.mem",
    "mem-per-cpu": "slurm.mem",
    "mem-per-gpu": "slurm.mem",
    "nodes": "slurm.train.nodes",
    "partition": "slurm.partition",
    "qos": "slurm.qos",
    "time": _TIME,
}
_SHORT = {
    **{"a": "array", "d": "dependency", "D": "chdir", "e": "error", "J": "job-name", "n": "ntasks", "o": "output"},
    **{"A": "account", "C": "constraint", "c": "cpus-per-task", "G": "gpus", "N": "nodes", "p": "partition"},
    **{"q": "qos", "t": "time", "W": "wait", "M": "clusters", "k": "no-kill"},
}


def check_option(line: str) -> None:
    """Refuse a line that is not one option of sbatch, has a setting, is given by the chain itself, or would break it.

    Raises:
        ValueError: says which, and why.
    """
    name = _option_name(line)
    # sbatch takes shortened names as well.
    for option, why in _OURS.items():
        if option.startswith(name):
            raise ValueError(f"{line!r}: the chain sets --{name} itself: {why}")
    for option, why in _BREAKS.items():
        if option.startswith(name):
            raise ValueError(f"{line!r}: the chain does not work with --{option}: {why}")
    for option, setting in _SETTINGS.items():
        if option.startswith(name):
            raise ValueError(f"{line!r}: set {setting} instead")


def _option_name(line: str) -> str:
    """The long name, without dashes, of the one option in an #SBATCH line; of a short one that is not ours, `-x`."""
    try:
        words = shlex.split(line)  # as sbatch does, which would take several options from one line
    except ValueError:
        words = []
    option, *values = words or [""]
    if not values and (found := re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)):
        return found[1]
    # Not -xVALUE: sbatch reads -Hd as -H and -d.
    if re.fullmatch(r"-[A-Za-z]", option) and len(values) <= 1 and not "".join(values).startswith("-"):
        return _SHORT.get(option[1], option)
    raise ValueError(
        f"{line!r} is not one option of sbatch: write it as in --mail-type=FAIL, each as an item of its own"
    )
