"""`pipeline status`: each job of a chain in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from cache.errors import PipelineError
from cache.progress import Progress
from pipeline.chain_progress import PartsProgress, StageProgress, parts_progress, stage_progress
from pipeline.chain_record import Chain, ChainFolder, SubmittedJob
from pipeline.chain_submit import kind_of, look
from pipeline.config import PipelineConfig
from pipeline.printed_commands import runnable
from slurm.client import RUNNING, JobInfo, SlurmClient

LOG_LINES = 8
_REASONS = {
    "AssocGrpCpuLimit": "your account's share of CPUs is in use",
    "AssocGrpGRES": "your account's share of GPUs is in use",
    "BadConstraints": "no node has what it asks for",
    "BeginTime": "held back for a while after it went back into the queue",
    "Dependency": "waits for the jobs before it",
    "DependencyNeverSatisfied": "will never start: a job before it failed",
    "JobArrayTaskLimit": "as many tasks run as slurm.cache.max_running allows",
    "JobHeldAdmin": "held by those who run the cluster",
    "JobHeldUser": "held; `scontrol release` lets it go",
    "NonZeroExitCode": "its command failed",
    "OutOfMemory": "it used more memory than it asked for",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "Priority": "other jobs have priority",
    "QOSMaxGRESPerUser": "as many GPUs as your quality of service allows are in use",
    "QOSMaxJobsPerUserLimit": "as many jobs as your quality of service allows are running",
    "Resources": "waits for free nodes",
    "TimeLimit": "its time limit was reached",
}


def status(settings: PipelineConfig, progress: Progress, client: SlurmClient) -> str:
    """The jobs that were submitted for the run folder, in order.

    Args:
        progress: of finding out what is finished, which is only asked where a job ended without it, or is forgotten.

    Raises:
        ConfigError: jobs.json is damaged.
        SlurmError: SLURM is missing or does not answer.
    """
    folder = ChainFolder(settings.output_dir)
    chain = folder.load()
    if chain is None:
        return (
            f"nothing was submitted for {settings.output_dir}; "
            f"{runnable('`pipeline submit`')} submits what is not finished\n"
            "Jobs of slurm/chain.sh, or of an sbatch of your own, are not followed: `squeue --me` shows them."
        )
    infos = look(chain, client)
    shown = [(job, seen) for job in chain.jobs if (seen := _not_replaced(chain, job, infos[job.id])) is not None]
    finished, note = frozenset[str](), []
    if any(_ended_badly(seen) for _, seen in shown):
        from pipeline.chain_finished import finished_jobs

        try:
            finished = finished_jobs(settings, progress)
        except PipelineError as error:
            # The states are no less true for it.
            note = [runnable(f"what is finished cannot be told: {error}")]
    lines = [f"chain in {folder.folder}"]
    for job, seen in shown:
        lines += _job_lines(settings, folder, chain, job, seen, finished=job.name in finished)
    return "\n".join([*lines, *note])


def _not_replaced(chain: Chain, job: SubmittedJob, infos: Sequence[JobInfo]) -> list[JobInfo] | None:
    """Without the tasks that were submitted again; None where nothing of the job is left."""
    later = chain.jobs[chain.jobs.index(job) + 1 :]
    again = {task for other in later if other.name == job.name for task in other.tasks or ()}
    if job.tasks and again.issuperset(job.tasks):
        return None
    return [info for info in infos if info.task not in again]


def _ended_badly(infos: Sequence[JobInfo]) -> bool:
    """Nothing of it is queued or running, and not all of it is known to have ended well."""
    return not any(info.active for info in infos) and (not infos or any(i.state != "COMPLETED" for i in infos))


def _job_lines(
    settings: PipelineConfig,
    folder: ChainFolder,
    chain: Chain,
    job: SubmittedJob,
    infos: Sequence[JobInfo],
    *,
    finished: bool,
) -> list[str]:
    head = f"{job.name:24s} {job.id:>8s}  "
    over = finished and _ended_badly(infos)
    if not infos:
        if over:
            return [f"{head}finished; SLURM does not know the job any more"]
        return [f"{head}SLURM does not know it any more; {runnable('`pipeline submit`')} does what is left of it"]
    lines = [f"{head}finished; the job itself: {_state(infos)}" if over else head + _state(infos)]
    lines += [f"    {line}" for line in _progress(settings, chain, job, infos)]
    for info in infos:
        if not over and not info.active and info.state != "COMPLETED":
            lines += [f"    {line}" for line in failure_lines(settings, folder, job, info)]
    return lines


def _state(infos: Sequence[JobInfo]) -> str:
    """`RUNNING`; of an array how many tasks are in which state; why a job waits; how often it was requeued."""
    counts = Counter(info.state for info in infos)
    array = infos[0].task is not None
    text = ", ".join(f"{count} {state}" if array else state for state, count in counts.items())
    reasons = {info.reason for info in infos if info.state == "PENDING" and info.reason}
    explained = [f"{reason}: {_REASONS[reason]}" if reason in _REASONS else reason for reason in sorted(reasons)]
    requeued = sum(info.restarts or 0 for info in infos)
    notes = [*explained, *([f"put back into the queue {requeued} times"] if requeued else [])]
    return f"{text}  ({'; '.join(notes)})" if notes else text


def failure_lines(settings: PipelineConfig, folder: ChainFolder, job: SubmittedJob, info: JobInfo) -> list[str]:
    """Why a job or task ended, what to do where that is known, and the end of its log."""
    why = _REASONS.get(info.reason, info.reason)
    ending = ", ".join(part for part in (f"exit code {info.exit_code}" if info.exit_code else "", why) if part)
    log = folder.log(job, info.task)
    lines = [f"{info.name} {info.state}{f' ({ending})' if ending else ''}"]
    if info.state == "OUT_OF_MEMORY":
        own = f"slurm.{kind_of(job)}.mem"
        # Where the kind has its own, the common one is not looked at.
        keys = own if getattr(settings.slurm, kind_of(job)).mem is not None else f"slurm.mem or {own}"
        lines.append(f"  What to do: raise {keys}, then run {runnable('`pipeline submit`')} again")
    if info.started is None or not log.is_file():
        return lines
    return [*lines, f"  {log} ends:", *(f"  | {line}" for line in _end_of(log))]


def _end_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 64 * 1024))
        text = file.read().decode("utf-8", errors="replace")
    lines = [line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").splitlines()]
    return [line for line in lines if line][-LOG_LINES:]


def _progress(settings: PipelineConfig, chain: Chain, job: SubmittedJob, infos: Sequence[JobInfo]) -> Iterable[str]:
    running = [info for info in infos if info.state in RUNNING]
    if job.split is not None and chain.cache is not None:
        cache = Path(chain.workdir) / chain.cache
        progress = parts_progress(cache, job.split, chain.num_parts)
        if progress is None:
            yield "the images of the split are not counted yet"
        else:
            yield _parts_line(progress)
            for info in running:
                if info.task is not None and info.started is not None:
                    done, total = progress.parts[info.task]
                    end = progress.end_of(info.task, info.started)
                    yield f"part {info.task}: {done} of {total} images{_against(end, info.ends)}"
    for label, run in _stages(settings, chain, job):
        if run is not None:
            # What was written before the job began tells nothing about its pace.
            fresh = [info for info in running if info.started is not None and info.started <= run.written]
            end = run.end if fresh else None
            limit = fresh[0].ends if fresh else None
            yield f"{label}{run.describe()}{_against(end, limit)}"


def _stages(settings: PipelineConfig, chain: Chain, job: SubmittedJob) -> Iterable[tuple[str, StageProgress | None]]:
    from pipeline.chain import ALL
    from pipeline.experiments import experiments_of

    output = Path(chain.workdir) / settings.output_dir
    if job.folder is not None:
        yield "", stage_progress(output / job.folder)
    elif job.name == ALL:
        for experiment in experiments_of(settings):
            for stage in experiment.stages:
                yield f"{stage.label}: ", stage_progress(Path(chain.workdir) / stage.settings.output_dir)


def _parts_line(progress: PartsProgress) -> str:
    done, total = (sum(counts[index] for counts in progress.parts) for index in (0, 1))
    return f"{done} of {total} images of the split are committed"


def _against(end: datetime | None, limit: datetime | None) -> str:
    """The predicted end against the time limit."""
    if end is None:
        return ""
    text = f", ends about {end:%d %b %H:%M}"
    if limit is None:
        return text
    if end <= limit:
        return f"{text}, before its limit {limit:%d %b %H:%M}"
    return f"{text}, after its limit {limit:%d %b %H:%M}: it will go back into the queue then and go on"
