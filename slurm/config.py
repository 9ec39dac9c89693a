"""Settings of the jobs. The docstring of a field is its entry in docs/configuration.md."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from slurm.extra_options import check_option
from slurm.times import parse_time


def _option_value(value: str) -> str:
    if not value:
        raise ValueError("must not be empty; leave it out instead")
    if any(not char.isprintable() for char in value) or "\\" in value:
        raise ValueError("cannot stand in an #SBATCH line: no line breaks, control characters or backslashes there")
    return value


def _script_line(value: str) -> str:
    if any(ord(char) < 32 and char != "\t" for char in value) or value.endswith("\\"):
        raise ValueError("must be one whole line of bash; give several as several items of the list")
    return value


def _time(value: str) -> str:
    parse_time(value)
    return value


def _memory(value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]?", value):
        raise ValueError("must be a size such as 64G")
    return value


def _gpu_type(value: str) -> str:
    # In --gres a colon or comma would begin something else.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", value):
        raise ValueError(
            "must be a type of GPU such as a100, of letters, digits and -_.+ only, without a number of GPUs"
        )
    return value


OptionValue = Annotated[str, AfterValidator(_option_value)]
ScriptLine = Annotated[str, AfterValidator(_script_line)]
TimeLimit = Annotated[str, AfterValidator(_time)]
Memory = Annotated[str, AfterValidator(_memory)]
GpuType = Annotated[str, AfterValidator(_gpu_type)]


class Section(BaseModel):
    """Base of every part of the settings: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class JobConfig(Section):
    """What a kind of job asks for. What is left out is that of `slurm`."""

    time: TimeLimit = "1h"
    """Time limit: `6h`, `90m`, or SLURM's `"08:00:00"` and `"1-12:00:00"` in quotes."""
    gpus: int = Field(default=1, ge=0)
    """GPUs on each node."""
    gpu_type: GpuType | None = None
    """Type of the GPUs, e.g. `a100`."""
    cpus_per_task: int | None = Field(default=None, gt=0)
    """CPUs on each node."""
    mem: Memory | None = None
    """Memory on each node, e.g. `64G`."""
    partition: OptionValue | None = None
    """Partition."""
    qos: OptionValue | None = None
    """Quality of service."""
    constraint: OptionValue | None = None
    """Features that a node must have."""

    @property
    def seconds(self) -> int:
        """The time limit."""
        return parse_time(self.time)


class CacheJobs(JobConfig):
    """The tasks that run the vision tower: a job array for each split."""

    time: TimeLimit = "4h"
    """Time limit of a task: `6h`, `90m`, or SLURM's `"08:00:00"`, in quotes."""
    num_parts: int = Field(default=4, gt=0)
    """Among how many tasks the images of a split are divided."""
    max_running: int | None = Field(default=None, gt=0)
    """How many tasks may run at once. Default: as many as SLURM lets."""


class TrainJobs(JobConfig):
    """The jobs that train; one for each stage, or one for all experiments."""

    time: TimeLimit = "8h"
    """Time limit of a job: `6h`, `90m`, or SLURM's `"08:00:00"`, in quotes."""
    nodes: int = Field(default=1, gt=0)
    """Nodes of a job. With more than one process (nodes times gpus) srun and torchrun start them."""


class LightJobs(JobConfig):
    """The check of the cache and the comparison, which read little and compute nothing."""

    time: TimeLimit = "30m"
    """Time limit of a job."""
    gpus: int = Field(default=0, ge=0)
    """GPUs, for partitions that refuse jobs without one."""


class SlurmConfig(Section):
    """What `pipeline submit` asks SLURM for."""

    partition: OptionValue | None = None
    """Partition; the cluster's default when left out."""
    account: OptionValue | None = None
    """Account that is charged."""
    qos: OptionValue | None = None
    """Quality of service."""
    constraint: OptionValue | None = None
    """Features that a node must have, e.g. `a100`."""
    gpu_type: GpuType | None = None
    """Type of the GPUs, e.g. `a100` (`sinfo -o %G` lists those of the cluster); any when left out."""
    cpus_per_task: int | None = Field(default=None, gt=0)
    """CPUs on each node; the cluster's default when left out."""
    mem: Memory | None = None
    """Memory on each node, e.g. `64G`; the cluster's default when left out."""
    modules: tuple[OptionValue, ...] = ()
    """Loaded in every job by `module load`, in this order."""
    setup: tuple[ScriptLine, ...] = ()
    """Lines of bash run in every job before its command, e.g. `[source /home/me/venv/bin/activate]`."""
    sbatch: tuple[OptionValue, ...] = ()
    """More options for every job, one an item, e.g. `["--mail-type=FAIL", "--exclude=node07"]`; none that has a
    setting here, and none that the chain gives itself or that would break it, such as `--export` and `--clusters`."""
    signal_seconds: int = Field(default=300, ge=1, le=65535)
    """How long before its time limit a job is told to stop: long enough for a step, an evaluation and a checkpoint. It
    then goes back into the queue and goes on from there."""
    max_requeues: int = Field(default=20, ge=0)
    """How often a job goes back into the queue before it ends for good."""
    experiments: Literal["jobs", "allocation"] = "jobs"
    """`jobs`: each stage of each experiment is a job of its own. `allocation`: one job with `train.gpus` GPUs runs them
    all, an experiment a GPU, the longest first."""
    cache: CacheJobs = CacheJobs()
    """Caching."""
    train: TrainJobs = TrainJobs()
    """Training."""
    eval: JobConfig = JobConfig()
    """Evaluation."""
    light: LightJobs = LightJobs()
    """The check of the cache and the comparison."""

    @field_validator("sbatch")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            check_option(line)
        return value

    @model_validator(mode="after")
    def _signal_within_limit(self) -> SlurmConfig:
        for name, job in (("cache", self.cache), ("train", self.train)):
            if job.seconds <= self.signal_seconds:
                raise ValueError(
                    f"signal_seconds {self.signal_seconds} is no shorter than {name}.time {job.time}: "
                    "the job would be told to stop as soon as it starts"
                )
        return self
