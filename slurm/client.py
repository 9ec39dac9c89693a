"""SLURM's commands: submit, look, cancel, put back into the queue. Works with and without accounting."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slurm.arrays import one_by_one, parse_name, parse_tasks
from slurm.environment import without_job
from slurm.errors import NoAnswerError, SlurmError

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "STOPPED"})
RUNNING = frozenset({"RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT"})
_TIMEOUT_SECONDS = 90
# Words of a command that did not get through to the controller; munge vouches for who asks.
_OUT_OF_REACH = ("contact slurm controller", "could not establish a configuration source", "munge encode failed")
# Words of a busy controller. Asking again does no harm; submitting again could.
_BUSY = ("zero bytes were transmitted", "socket timed out", "connection reset by peer")
_ASK_AGAIN_SECONDS = (0.5, 2.0, 5.0)
_SETTING = "slurm.{}".format
# Times as they are parsed; and a list of tasks would end behind 64 characters by `...`.
_PLAIN_OUTPUT = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job, or a task of an array, as SLURM sees it.

    Attributes:
        id: the number that sbatch gave.
        task: of an array; None for a single job.
        state: SLURM's word, e.g. PENDING.
        reason: why it waits or failed, SLURM's word; empty when there is none.
        started, ends: `ends` is the time limit of a running job, and the true end of one that has ended.
        exit_code: `1` or `signal 9`; empty while there is none.
        restarts: how often it was put back into the queue; None where that is not known.
    """

    id: str
    task: int | None
    state: str
    reason: str = ""
    started: datetime | None = None
    ends: datetime | None = None
    exit_code: str = ""
    restarts: int | None = None

    @property
    def active(self) -> bool:
        """Queued or running."""
        return self.state in WAITING or self.state in RUNNING

    @property
    def name(self) -> str:
        """`12`, or `12_3`."""
        return self.id if self.task is None else f"{self.id}_{self.task}"


class SlurmClient:
    """Runs sbatch, scontrol, sacct and scancel.

    Raises (all methods):
        SlurmError: they are not installed, the controller does not answer, or it refused; in SLURM's own words.
    """

    def submit(
        self,
        script: Path,
        *,
        after_ok: Sequence[str] = (),
        after_any: Sequence[str] = (),
        setting: Callable[[str], str] = _SETTING,
    ) -> str:
        """Submit a script and return the job's number.

        Args:
            after_ok: it starts when these jobs have ended well, and never when one has not; of an array all tasks, or
                those that are named: `12_3`, `12_[0,3]`.
            after_any: it starts when these jobs have ended.
            setting: `mem` -> the key that gave it, e.g. `slurm.mem`; for what to do about a refusal.

        Raises:
            NoAnswerError: the job may be in the queue all the same.
            SlurmError: also when SLURM does not know one of these jobs; sbatch would take it and start the job.
        """
        self._require_known(script, (*after_ok, *after_any))
        conditions = [
            f"{kind}:{':'.join(one for name in names for one in one_by_one(name))}"
            for kind, names in (("afterok", after_ok), ("afterany", after_any))
            if names
        ]
        options = [f"--dependency={','.join(conditions)}", "--kill-on-invalid-dep=yes"] if conditions else []
        done = self._run("sbatch", "--parsable", *options, str(script))
        if done.returncode:
            raise self._refused(f"sbatch refused {script.name}", done, setting)
        # NUMBER, or NUMBER;CLUSTER where there are several clusters.
        return done.stdout.strip().partition(";")[0]

    def jobs(self, job: str) -> list[JobInfo]:
        """What is known of a job, or of each task of an array; empty when SLURM knows it no more."""
        done = self._ask("scontrol", "show", "job", job)
        if done.returncode == 0:
            return [info for text in done.stdout.split("\n\n") if "JobId=" in text for info in _parse(job, text)]
        if "Invalid job id" in done.stderr:
            return self._from_accounting(job)
        raise self._refused(f"scontrol cannot tell about job {job}", done)

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs, whether they wait or run."""
        if jobs:
            done = self._run("scancel", *jobs)
            if done.returncode:
                raise self._refused("scancel failed", done)

    def requeue(self, job: str) -> None:
        """Put a job back into the queue. If it is the own one, everything that it runs is killed soon after."""
        done = self._run("scontrol", "requeue", job)
        if done.returncode:
            raise self._refused(f"job {job} could not be put back into the queue", done)

    def partitions(self) -> list[str]:
        """Names of the partitions."""
        return sorted(set(self._ask("sinfo", "--noheader", "--format=%R").stdout.split()))

    def _require_known(self, script: Path, names: Sequence[str]) -> None:
        known: dict[str, set[str]] = {}
        for one in dict.fromkeys(one for name in names for one in one_by_one(name)):
            number = parse_name(one)[0]
            if number not in known:
                infos = self.jobs(number)
                known[number] = {info.name for info in infos} | ({number} if infos else set())
            if one not in known[number]:
                raise SlurmError(
                    f"{script.name} is to start after job {one}, which SLURM does not know (any more)",
                    do="see `pipeline status`, then run `pipeline submit` again",
                )

    def _from_accounting(self, job: str) -> list[JobInfo]:
        """The database remembers for longer, where there is one."""
        try:
            done = self._run("sacct", "-X", "-n", "-P", "-j", job, "-o", "JobID,State,ExitCode,Start,End")
        except SlurmError:
            return []
        found = []
        for line in done.stdout.splitlines() if done.returncode == 0 else []:
            name, state, code, start, end = line.split("|")
            for task in _each(parse_name(name)[1]):
                found.append(JobInfo(job, task, state.split()[0], "", _time(start), _time(end), _exit_code(code), None))
        return found

    def _ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command that changes nothing, again where the controller was too busy to answer."""
        for seconds in _ASK_AGAIN_SECONDS:
            done = self._run(*command)
            if not done.returncode or not any(sign in done.stderr.lower() for sign in _BUSY):
                return done
            time.sleep(seconds)
        return self._run(*command)

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = without_job(os.environ)
        # A job inherits what sbatch has: it gets the submitter's own.
        if command[0] != "sbatch":
            environment |= _PLAIN_OUTPUT
        try:
            return subprocess.run(  # noqa: S603  (SLURM's own programs, no shell)
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
            )
        except FileNotFoundError:
            raise SlurmError(
                f"SLURM was not found: there is no command `{command[0]}` on PATH here",
                do="run this on a login node of the cluster (perhaps after `module load slurm`); without SLURM run the "
                "verbs cache, train and eval by hand, one after another",
            ) from None
        except subprocess.TimeoutExpired:
            raise NoAnswerError(
                f"SLURM does not answer: `{command[0]}` waited for {_TIMEOUT_SECONDS} s",
                do="try again; if it stays so, ask those who run the cluster",
            ) from None

    def _refused(
        self, what: str, done: subprocess.CompletedProcess[str], setting: Callable[[str], str] = _SETTING
    ) -> SlurmError:
        words = (done.stderr or done.stdout).strip()
        lines = "".join(f"\n    {line}" for line in words.splitlines())
        if any(sign in words.lower() for sign in _OUT_OF_REACH):
            return SlurmError(
                f"SLURM does not answer: `{done.args[0]}` cannot reach its controller. It says:{lines}",
                do="try again when the controller answers (`scontrol ping`), or on a login node of the cluster",
            )
        kind = NoAnswerError if "timed out" in words.lower() else SlurmError
        return kind(f"{what}. SLURM says:{lines}", do=self._advice(words, setting))

    def _advice(self, words: str, setting: Callable[[str], str]) -> str:
        lower = words.lower()
        if "timed out" in lower:
            return "see with `squeue --me` whether it was done all the same, then try again"
        if "invalid partition" in lower:
            return f"set {setting('partition')} to one of: {', '.join(self.partitions())}"
        if "account" in lower or "qos" in lower:
            return (
                f"correct slurm.account or {setting('qos')}; `sacctmgr show associations user=$USER` lists what you "
                "may use"
            )
        if "memory specification" in lower:
            return f"lower {setting('mem')}; `sinfo -Nel` shows the memory of the nodes, in MB"
        if "node configuration is not available" in lower or "generic resource" in lower:
            keys = [setting(name) for name in ("gpus", "gpu_type", "cpus_per_task", "mem", "constraint")]
            nodes = "`sinfo -No '%N %c %m %f %G'` shows what the nodes have"
            return f"ask for less: {', '.join(keys)} or slurm.train.nodes; {nodes}"
        if "time limit" in lower:
            return f"lower {setting('time')}; `sinfo` shows the limit of each partition"
        return "correct the setting of `slurm:` that it names, then run the same command again"


def _parse(job: str, text: str) -> list[JobInfo]:
    def field(name: str) -> str:
        found = re.search(rf"(?:^|\s){name}=(\S+)", text)
        return found[1] if found else ""

    tasks = field("ArrayTaskId")
    reason = field("Reason")
    code = field("ExitCode")
    state = field("JobState")
    return [
        JobInfo(
            job,
            task,
            state,
            "" if reason == "None" else reason,
            _time(field("StartTime")),
            _time(field("EndTime")),
            "" if state in WAITING or state in RUNNING else _exit_code(code),
            int(field("Restarts") or 0),
        )
        for task in _each(parse_tasks(tasks) if tasks else None)
    ]


def _each(tasks: frozenset[int] | None) -> list[int | None]:
    """A single job has none."""
    return [None] if tasks is None else [*sorted(tasks)]


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _exit_code(text: str) -> str:
    code, _, number = text.partition(":")
    return f"signal {number}" if number not in ("", "0") else code
