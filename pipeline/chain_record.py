"""What the run folder keeps of a chain: <output_dir>/slurm/ with config.yaml, jobs.json, scripts/ and logs/."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from cache.atomic import write_text
from cache.errors import ConfigError
from pipeline.config import PipelineConfig

logger = logging.getLogger("pipeline")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # as some network file systems answer


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SubmittedJob(_Document):
    """A job that sbatch took.

    Attributes:
        name: in the chain; a job that was submitted again stands here several times.
        id: SLURM's number.
        tasks: of an array.
        log: file name in logs/, with %j, %A and %a.
        split: of a caching array.
        folder: of a training job, the run folder; relative to output_dir.
        time_limit: seconds.
    """

    name: str
    id: str
    tasks: tuple[int, ...] | None
    log: str
    split: str | None = None
    folder: str | None = None
    time_limit: int


class Chain(_Document):
    """jobs.json.

    Attributes:
        workdir: where the jobs run, and relative paths begin.
        cache: the folder of the features, relative to workdir or absolute; None where they are read from an address.
        num_parts: among how many tasks the images of a split are divided.
        rows: split -> digest of the rows that training reads of it, as they were when jobs were submitted last.
        jobs: in the order in which they were submitted.
    """

    version: Literal[1] = 1
    workdir: str
    cache: str | None
    num_parts: int
    rows: dict[str, str] = {}
    jobs: tuple[SubmittedJob, ...] = ()


class ChainFolder:
    """The folder of a chain; everything in it is written by `pipeline submit` alone, but for the logs."""

    def __init__(self, output_dir: Path) -> None:
        self.folder = output_dir.absolute() / "slurm"
        self.config, self.logs = self.folder / "config.yaml", self.folder / "logs"
        self._jobs = self.folder / "jobs.json"

    def script(self, name: str) -> Path:
        """Where the script of a job lies."""
        return self.folder / "scripts" / f"{name}.sbatch"

    def log(self, job: SubmittedJob, task: int | None) -> Path:
        """The log of a job or a task."""
        name = job.log.replace("%A", job.id).replace("%j", job.id)
        return self.logs / (name if task is None else name.replace("%a", str(task)))

    def load(self) -> Chain | None:
        """What was submitted; None when nothing was.

        Raises:
            ConfigError: jobs.json is damaged.
        """
        try:
            return Chain.model_validate_json(self._jobs.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"is damaged: {str(error).splitlines()[0]}",
                where=str(self._jobs),
                do="see with `squeue --me` that none of its jobs is left, then remove it",
            ) from error

    def save(self, chain: Chain) -> None:
        """Write jobs.json."""
        write_text(self._jobs, chain.model_dump_json(indent=1))

    def kept(self) -> dict[Path, str | None]:
        """jobs.json and config.yaml as they are now; None for one that is not there."""
        files = (self._jobs, self.config)
        return {file: file.read_text(encoding="utf-8") if file.exists() else None for file in files}

    def put_back(self, kept: Mapping[Path, str | None]) -> None:
        """Make jobs.json and config.yaml what they were."""
        for file, text in kept.items():
            if text is None:
                file.unlink(missing_ok=True)
            else:
                write_text(file, text)

    @contextmanager
    def submitting(self) -> Iterator[None]:
        """Make the folders, and keep another `pipeline submit` out meanwhile.

        Raises:
            ConfigError: another one is at work.
        """
        for folder in (self.folder, self.logs, self.folder / "scripts"):
            folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                flock(lock, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    "another submission is at work", where=str(self.folder), do="wait until it has ended"
                ) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "%s: this file system keeps no locks (%s): do not submit here twice at once",
                    self.folder,
                    error.strerror,
                )
            yield


def snapshot(settings: PipelineConfig) -> str:
    """The configuration as the jobs read it, overrides included; only what was given, as defaults may depend on it."""
    return yaml.safe_dump(settings.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)


def differences(before: str, now: str) -> dict[str, str]:
    """What differs between two snapshots: key of the setting -> a line about it."""
    there, here = (_flat(yaml.safe_load(text)) for text in (before, now))
    keys = sorted(there.keys() | here.keys())
    return {
        key: f"{key}: {there.get(key, 'not set')!r} there, {here.get(key, 'not set')!r} now"
        for key in keys
        if there.get(key) != here.get(key)
    }


def only_for_new_jobs(key: str) -> bool:
    """Whether a setting is written into a job's script and nothing else, so that jobs with several values agree."""
    return key.startswith("slurm.") and key not in ("slurm.cache.num_parts", "slurm.experiments")


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value}
    return {k: v for name, part in value.items() for k, v in _flat(part, f"{key}.{name}" if key else str(name)).items()}
