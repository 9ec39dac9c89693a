"""`pipeline submit` and `pipeline cancel`: from the configuration to jobs in the queue, and out of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from cache.atomic import write_text
from cache.errors import ConfigError
from cache.progress import Progress
from pipeline.chain import ALL, CHECK, COMPARE, PlannedJob, plan_jobs
from pipeline.chain_queue import Infos, Queued, queued_of, to_submit
from pipeline.chain_record import Chain, ChainFolder, SubmittedJob, differences, only_for_new_jobs, snapshot
from pipeline.chain_shared import splits_before
from pipeline.config import PipelineConfig
from pipeline.printed_commands import runnable
from pipeline.record_check import check_records
from pipeline.training_check import check_training
from slurm.chain import ChainJob, check_setup, describe, submit_chain, take_back
from slurm.client import SlurmClient
from slurm.config import SlurmConfig
from slurm.errors import NoAnswerError, SlurmError
from slurm.sbatch import render

Kind = Literal["cache", "train", "eval", "light"]


def submit(settings: PipelineConfig, progress: Progress, client: SlurmClient, *, dry_run: bool) -> str:
    """Write the scripts of what is not finished and submit them; says what was done.

    Args:
        dry_run: only show scripts and order; nothing is written.

    Raises:
        ConfigError: jobs are still queued or running, and more differs than what new jobs ask for; or rows differ that
            something was trained on; says what.
        PipelineError: the model, the data or the cache cannot be used; of a split that is to be cached also a record.
        SlurmError: SLURM is missing or refused a job; those before it are cancelled, and the record is as it was.
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
    from pipeline.chain_rows import require_same_rows, training_rows
    from pipeline.chain_state import find_done

    chain = folder.load()
    queued = queued_of(chain, look(chain, client))
    text = snapshot(settings)
    note = _changes(folder, text, queued) if queued else ""
    done, cache = find_done(settings, progress)
    rows = training_rows(settings)
    require_same_rows(settings, folder, chain, queued, rows)
    base = Chain(
        workdir=str(Path.cwd()),
        cache=str(cache) if cache else None,
        num_parts=settings.slurm.cache.num_parts,
        rows={**(chain.rows if chain else {}), **rows},
        jobs=chain.jobs if chain else (),
    )
    before = splits_before(settings.data, list(done.missing_parts))
    planned, loose = to_submit(plan_jobs(settings, folder.config, done, before), queued)
    check_training(settings, done.stages)
    check_records(settings, [job.split for job in planned if job.split is not None], progress)
    scripts = {job.name: _script(settings, folder, job) for job in planned}
    remaining = {name: there.names for name, there in queued.items() if name not in loose}
    order = describe([job.chained for job in planned], remaining) or "nothing to do: everything is finished"
    order = f"{order}{note}"
    if dry_run:
        return "\n".join([*(f"# {folder.script(name)}\n{script}" for name, script in scripts.items()), order])
    if not planned:
        return order
    kept = folder.kept()
    write_text(folder.config, text)
    for name, script in scripts.items():
        write_text(folder.script(name), script)
    numbers: dict[str, str] = {}
    try:
        _enqueue(folder, base, planned, remaining, client, settings.slurm, numbers)
        client.cancel([number for name in loose for number in queued[name].ids])
    except SlurmError as refused:
        raise _taken_back(refused, folder, kept, numbers, client) from refused
    folder.save(_without_replaced(folder.load() or base))
    lines = [f"submitted {name:24s} job {number}" for name, number in numbers.items()]
    advice = f"{runnable('`pipeline status`')} shows them; scripts and logs are in {folder.folder}"
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


def kind_of(job: SubmittedJob) -> Kind:
    """The section of `slurm` that a job's own resources come from."""
    if job.split is not None:
        return "cache"
    if job.folder is not None or job.name == ALL:
        return "train"
    return "light" if job.name in (CHECK, COMPARE) else "eval"


def setting_of(slurm: SlurmConfig, kind: Kind, name: str) -> str:
    """The key that gives, or may give, a kind of job a resource: `slurm.eval.mem` if that is set, else `slurm.mem`."""
    own = f"slurm.{kind}.{name}"
    shared = name in SlurmConfig.model_fields
    return own if not shared or getattr(getattr(slurm, kind), name) is not None else f"slurm.{name}"


def _enqueue(
    folder: ChainFolder,
    chain: Chain,
    planned: Sequence[PlannedJob],
    queued: Mapping[str, Sequence[str]],
    client: SlurmClient,
    slurm: SlurmConfig,
    numbers: dict[str, str],
) -> None:
    """Submit, and keep each number as soon as it is known, in `numbers` and behind those of jobs.json."""
    by_name = {job.name: job for job in planned}
    jobs = list(chain.jobs)

    def submitted(job: ChainJob, number: str) -> None:
        numbers[job.name] = number
        jobs.append(by_name[job.name].submitted(number))
        folder.save(chain.model_copy(update={"jobs": tuple(jobs)}))

    def setting(job: ChainJob, name: str) -> str:
        return setting_of(slurm, kind_of(by_name[job.name].submitted("")), name)

    submit_chain(
        [job.chained for job in planned],
        queued,
        script_file=folder.script,
        client=client,
        submitted=submitted,
        setting=setting,
    )


def _taken_back(
    refused: SlurmError,
    folder: ChainFolder,
    kept: Mapping[Path, str | None],
    numbers: Mapping[str, str],
    client: SlurmClient,
) -> SlurmError:
    """Undo a submission that SLURM refused half-way; the error that says so.

    Jobs that cannot be cancelled stay in the record, with the configuration that they read.
    """
    try:
        left, why = take_back(list(numbers.values()), client), "they have not ended yet"
    except SlurmError as error:
        left, why = list(numbers.values()), error.what
    if left:
        return type(refused)(
            f"{refused.what}\n  Jobs of this submission are left in the queue: {', '.join(left)} ({why})",
            do=f"run `pipeline cancel`, which ends them; then {refused.do}",
        )
    folder.put_back(kept)
    there = f" The jobs before it were cancelled: {', '.join(numbers.values())}." if numbers else ""
    unsure = isinstance(refused, NoAnswerError)
    but = "Except perhaps for the one that got no answer, nothing" if unsure else "Nothing"
    return type(refused)(f"{refused.what}\n  {but} of this submission is left in the queue.{there}", do=refused.do)


def _without_replaced(chain: Chain) -> Chain:
    """The record without jobs that a later one stands for."""
    jobs = [
        old for number, old in enumerate(chain.jobs) if not any(_replaces(new, old) for new in chain.jobs[number + 1 :])
    ]
    return chain.model_copy(update={"jobs": tuple(jobs)})


def _replaces(new: SubmittedJob, old: SubmittedJob) -> bool:
    """Whether nothing of the older job is of interest any more."""
    return old.name == new.name and set(old.tasks or ()) <= set(new.tasks or ())


def _changes(folder: ChainFolder, text: str, queued: Mapping[str, Queued]) -> str:
    """Refuse settings that jobs in the queue would not share; a note on those that hold for new jobs alone."""
    try:
        before = folder.config.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(folder.config), do="run `pipeline cancel` first"
        ) from error
    changed = differences(before, text)
    refused = [line for key, line in changed.items() if not only_for_new_jobs(key)]
    if refused:
        raise ConfigError(
            f"jobs of this run folder are still queued or running ({', '.join(queued)}), with other settings:\n    "
            + "\n    ".join(refused),
            where=str(folder.folder),
            do="set them back, or run `pipeline cancel` first, or give another output_dir",
        )
    if not changed:
        return ""
    return "\n    ".join(("\nfor the jobs submitted from now on, not for those in the queue:", *changed.values()))


def _script(settings: PipelineConfig, folder: ChainFolder, job: PlannedJob) -> str:
    return render(
        job.chained.script, settings.slurm, logs=folder.logs, workdir=Path.cwd(), path=Path(sys.executable).parent
    )
