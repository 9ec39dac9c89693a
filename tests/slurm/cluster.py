"""A real SLURM of one host, without systemd: munge, a controller, and a daemon for each of two nodes with fake GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from fcntl import LOCK_EX, flock
from pathlib import Path

from tests.ports import free_ports

NODES, CPUS, MEMORY_MB, GPUS, GPU_TYPE = 2, 8, 16000, 4, "a100"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HOSTS = Path("/etc/hosts")
_QUESTION = re.compile("squeue|sinfo|scontrol show")
_BUSY = re.compile("Zero Bytes were transmitted|Socket timed out|Connection reset")
# What nothing depends on when all goes well: how long a machine that does much else may take.
_PATIENCE = 400.0


def missing_programs() -> list[str]:
    """What of SLURM and munge is not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """Partitions: `debug` (the default), whose jobs give way to those of `urgent`. All daemons end with `stop`.

    Args:
        folder: an empty folder for configuration, keys, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        name = f"n{secrets.token_hex(3)}"  # no other cluster on this host may have nodes of these names
        self.nodes = [f"{name}-{number}" for number in range(1, NODES + 1)]
        self._mark = f"# {folder}"

    @property
    def environment(self) -> dict[str, str]:
        """For clients: nothing of a cluster or job that the tests themselves may run in."""
        own = {k: v for k, v in os.environ.items() if not re.match(r"(SLURM|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL)_", k)}
        return {**own, "SLURM_CONF": str(self.conf), "PATH": f"{own.get('PATH', '')}:{_PATH}"}

    def start(self) -> None:
        """Until the nodes take jobs; about two seconds."""
        for name in ("munge", "state", "spool", "log", "run", "dev"):
            (self.folder / name).mkdir()
        for folder in (self.folder, self.folder / "munge"):
            folder.chmod(0o755)  # munge refuses to live where others may write
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        ports = free_ports(1 + NODES)
        self._write_configuration(ports)
        self._name_nodes()
        munge = self.folder / "munge"
        self._run(
            "munged",
            "--num-threads=2",
            f"--key-file={key}",
            f"--socket={munge}/sock",
            f"--pid-file={munge}/pid",
            f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={munge}/seed",
        )
        self._run("slurmctld")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self._states() == {"idle"}, "the nodes are up")

    def start_node(self, node: str) -> None:
        """Start a node's daemon (again); the node then counts as up, whatever it was set to before."""
        self._run("slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """As if its power failed: the daemon and everything of its jobs is killed at once."""
        self._kill(self._pid(f"slurmd-{node}"))
        for pid in self._job_processes(node):
            self._kill(pid)

    def stop(self) -> None:
        """End the jobs, the daemons and whatever a job has left."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            ids = self.client("squeue", "-h", "-o", "%A").split()
            if ids:
                self.client("scancel", *ids)
                self.until(lambda: not self.client("squeue", "-h", "-o", "%A").split(), "all jobs have ended", 60)
        for name in ("slurmctld", *(f"slurmd-{node}" for node in self.nodes)):
            self._end(self._pid(name))
        for node in (*self.nodes, None):
            for pid in self._job_processes(node):
                self._kill(pid)
        self._end(self._pid(None))
        if self._mark in _HOSTS.read_text():
            with _HOSTS.open("r+") as file:  # in place: it may be mounted
                flock(file, LOCK_EX)
                kept = [line for line in file if self._mark not in line]
                file.seek(0)
                file.writelines(kept)
                file.truncate()

    def client(self, *command: str) -> str:
        """Run a client command and return its output; a busy controller is asked again."""
        for attempts_left in (3, 2, 1, 0):
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, check=False, timeout=200
            )
            if not done.returncode:
                return done.stdout
            if not (attempts_left and _QUESTION.match(" ".join(command)) and _BUSY.search(done.stderr)):
                break
            time.sleep(2)
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")

    def state(self, job: str) -> str:
        """A job's state as SLURM names it; of an array the states of all tasks, in order and parted by blanks."""
        lines = self.client("squeue", "-h", "-r", "-t", "all", "-j", job, "-o", "%K %T").splitlines()
        return " ".join(line.split()[1] for line in sorted(lines))

    def show(self, job: str, field: str) -> str:
        """One field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S*)", self.client("scontrol", "show", "job", job))
        assert found, field
        return found[1]

    def wait(self, jobs: Sequence[str], seconds: float = _PATIENCE) -> dict[str, str]:
        """Until all jobs have ended; the state of each."""
        states: dict[str, str] = {}

        def ended() -> bool:
            states.update({job: self.state(job) for job in jobs})
            return all(word in ENDED for state in states.values() for word in state.split())

        self.until(ended, f"the jobs {' '.join(jobs)} have ended", seconds, lambda: str(states))
        return states

    def until(
        self, ready: Callable[[], bool], what: str, seconds: float = _PATIENCE, now: Callable[[], str] = lambda: ""
    ) -> None:
        """Poll until `ready`."""
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}. {now()}\n{self._daemons_say()}"
            time.sleep(0.4)

    def _daemons_say(self) -> str:
        return "\n".join(f"{f.name}: {f.read_text()[-800:]}" for f in sorted((self.folder / "log").glob("*.log")))

    def _states(self) -> set[str]:
        try:
            return set(self.client("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split())
        except (RuntimeError, subprocess.TimeoutExpired):
            return set()

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, env={**self.environment, "PATH": _PATH}, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr.decode()}\n{self._daemons_say()}"

    def _pid(self, name: str | None) -> int | None:
        file = self.folder / "munge" / "pid" if name is None else self.folder / "run" / f"{name}.pid"
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int(file.read_text())
        return None

    def _end(self, pid: int | None) -> None:
        if pid is None or not _alive(pid):
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while _alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill(pid)

    def _kill(self, pid: int | None) -> None:
        if pid is not None and _alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _job_processes(self, node: str | None) -> list[int]:
        """Processes of jobs on a node, and SLURM's own that look after them (`None`: these alone)."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "comm").read_text().strip()
            except OSError:
                continue
            if f"SLURM_CONF={self.conf}".encode() not in environment:
                continue
            of_node = node is not None and f"SLURMD_NODENAME={node}".encode() in environment
            if of_node or (command == "slurmstepd" and node is None):
                found.append(int(folder.name))
        return found

    def _name_nodes(self) -> None:
        """Rendezvous goes by the names of nodes."""
        if os.access(_HOSTS, os.W_OK):
            with _HOSTS.open("a") as file:
                flock(file, LOCK_EX)
                file.writelines(f"127.0.0.1 {node} {self._mark}\n" for node in self.nodes)

    def _write_configuration(self, ports: Sequence[int]) -> None:
        host = socket.gethostname().split(".")[0]
        folder = self.folder
        devices = [_device(folder / "dev" / f"nvidia{number}", number) for number in range(GPUS)]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory={MEMORY_MB} "
            f"Gres=gpu:{GPU_TYPE}:{GPUS} State=UNKNOWN"
            for node, port in zip(self.nodes, ports[1:], strict=True)
        ]
        self.conf.write_text(
            f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# cred_expire: within it a job has to start; it is also how long a requeued one is held back.
AuthInfo=socket={folder}/munge/sock,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
BatchStartTimeout=100
KillWait=2
UnkillableStepTimeout=300
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=50000,sched_interval=2,bf_interval=2,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
AccountingStorageType=accounting_storage/none
{chr(10).join(nodes)}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE DefaultTime=60 State=UP PriorityTier=9 PreemptMode=OFF
"""
        )
        gres = [f"NodeName={','.join(self.nodes)} Name=gpu Type={GPU_TYPE} File={device}" for device in devices]
        (folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *gres, ""]))


def _device(file: Path, number: int) -> Path:
    """A GPU's device file must be a character device; which one does not matter."""
    try:
        os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3))
    except PermissionError:
        return Path(("/dev/null", "/dev/zero", "/dev/full", "/dev/random")[number])
    return file


def _alive(pid: int) -> bool:
    """A zombie still answers `kill -0`."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
