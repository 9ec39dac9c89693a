"""`pipeline submit` and `pipeline cancel`: from the configuration to jobs in the queue, and out of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cache.atomic import write_text
from cache.errors import ConfigError
from cache.progress import Progress
from pipeline.chain import PlannedJob, Queued, plan_jobs, to_submit
from pipeline.chain_record import Chain, ChainFolder, SubmittedJob, differences, snapshot
from pipeline.config import PipelineConfig
from slurm.chain import ChainJob, check_setup, describe, submit_chain
from slurm.client import JobInfo, SlurmClient
from slurm.sbatch import render

Infos = dict[str, list[JobInfo]]


def submit(settings: PipelineConfig, progress: Progress, client: SlurmClient, *, dry_run: bool) -> str:
    """Write the scripts of what is not finished and submit them; says what was done.

    Args:
        dry_run: only show scripts and order; nothing is written.

    Raises:
        ConfigError: jobs of another configuration are still queued or running; says what differs.
        PipelineError: the model, the data or the cache cannot be used.
        SlurmError: SLURM is missing or refused a job; those before it are in the queue.
    """
    check_setup(settings.slurm.setup)
    folder = ChainFolder(settings.output_dir)
    if dry_run:
        return _submit(settings, folder, progress, client, dry_run=True)
    with folder.submitting():
        return _submit(settings, folder, progress, client, dry_run=False)


def _submit(
    settings: PipelineConfig, folder: ChainFolder, progress: Progress, client: SlurmClient, *, dry_run: bool
) -> str:
    from pipeline.chain_state import find_done

    chain = folder.load()
    queued = queued_of(chain, look(chain, client))
    text = snapshot(settings)
    if queued:
        _refuse_changes(folder, text, queued)
    done, cache = find_done(settings, progress)
    workdir = Path.cwd()
    base = Chain(
        workdir=str(workdir),
        cache=str(cache) if cache else None,
        num_parts=settings.slurm.cache.num_parts,
        jobs=chain.jobs if chain else (),
    )
    planned, loose = to_submit(plan_jobs(settings, folder.config, done), queued)
    scripts = {job.name: _script(settings, folder, job, workdir) for job in planned}
    remaining = {name: there.ids for name, there in queued.items() if name not in loose}
    order = describe([job.chained for job in planned], remaining)
    if dry_run:
        shown = [f"# {folder.script(name)}\n{script}" for name, script in scripts.items()]
        return "\n".join([*shown, order or "nothing to do: everything is finished"])
    if not planned:
        return order or "nothing to do: everything is finished"
    write_text(folder.config, text)
    for name, script in scripts.items():
        write_text(folder.script(name), script)
    client.cancel([number for name in loose for number in queued[name].ids])
    numbers = _enqueue(folder, base, planned, remaining, client)
    lines = [f"submitted {name:24s} job {number}" for name, number in numbers.items()]
    advice = f"`pipeline status --config ...` shows them; scripts and logs are in {folder.folder}"
    return "\n".join([order, "", *lines, advice])


def cancel(settings: PipelineConfig, client: SlurmClient) -> str:
    """End what is left of the chain; says what was ended."""
    chain = ChainFolder(settings.output_dir).load()
    queued = queued_of(chain, look(chain, client))
    if not queued:
        return "nothing to cancel: no job of this chain is queued or running"
    client.cancel([number for there in queued.values() for number in there.ids])
    return "\n".join(f"cancelled {name:24s} job {', '.join(there.ids)}" for name, there in queued.items())


def look(chain: Chain | None, client: SlurmClient) -> Infos:
    """What SLURM knows of each job of a chain, by number."""
    return {job.id: client.jobs(job.id) for job in chain.jobs} if chain is not None else {}


def queued_of(chain: Chain | None, infos: Infos) -> dict[str, Queued]:
    """What is queued or running of a chain, by name."""
    found: dict[str, Queued] = {}
    for job in chain.jobs if chain is not None else ():
        active = [info for info in infos[job.id] if info.active and info.reason != "DependencyNeverSatisfied"]
        if active:
            before = found.get(job.name, Queued(()))
            found[job.name] = Queued(
                (*before.ids, job.id),
                before.tasks | {info.task for info in active if info.task is not None},
                before.waiting and all(info.state == "PENDING" for info in active),
            )
    return found


def _enqueue(
    folder: ChainFolder,
    chain: Chain,
    planned: Sequence[PlannedJob],
    queued: Mapping[str, Sequence[str]],
    client: SlurmClient,
) -> dict[str, str]:
    """Submit, and keep each number as soon as it is known."""
    by_name = {job.name: job for job in planned}
    numbers: dict[str, str] = {}
    jobs = list(chain.jobs)

    def submitted(job: ChainJob, number: str) -> None:
        new = by_name[job.name].submitted(number)
        jobs[:] = [*(old for old in jobs if not _replaces(new, old)), new]
        folder.save(chain.model_copy(update={"jobs": tuple(jobs)}))
        numbers[job.name] = number

    submit_chain(
        [job.chained for job in planned], queued, script_file=folder.script, client=client, submitted=submitted
    )
    return numbers


def _replaces(new: SubmittedJob, old: SubmittedJob) -> bool:
    """Whether nothing of the older job is of interest any more."""
    return old.name == new.name and set(old.tasks or ()) <= set(new.tasks or ())


def _refuse_changes(folder: ChainFolder, text: str, queued: Mapping[str, Queued]) -> None:
    try:
        before = folder.config.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(folder.config), do="run `pipeline cancel` first"
        ) from error
    changed = differences(before, text)
    if changed:
        raise ConfigError(
            f"jobs of this run folder are still queued or running ({', '.join(queued)}), with other settings:\n    "
            + "\n    ".join(changed),
            where=str(folder.folder),
            do="set them back, or run `pipeline cancel` first, or give another output_dir",
        )


def _script(settings: PipelineConfig, folder: ChainFolder, job: PlannedJob, workdir: Path) -> str:
    return render(
        job.chained.script, settings.slurm, logs=folder.logs, workdir=workdir, path=Path(sys.executable).parent
    )
