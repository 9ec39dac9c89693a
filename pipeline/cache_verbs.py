"""What the verbs about the cache do: many processes, verify, repair, prune. Returns what the command line prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast, get_args

from cache.build import CacheBuilder
from cache.config import StorageDtype
from cache.errors import CacheError, ConfigError
from cache.files import fingerprint_folders
from cache.find import BACKEND_FIELDS, find_cache
from cache.fingerprint import Fingerprint, expected_fingerprint
from cache.formats import FORMATS
from cache.manifest import folder_name, load_manifest
from cache.parts import Part
from cache.processes import Child, run_children
from cache.progress import Progress
from cache.prune import remove_fingerprint, remove_leftovers, survey_holdings, total_bytes
from cache.repack import repack as repack_cache
from cache.repair import set_damaged_aside
from cache.verify import verify_cache
from pipeline.cache_figures import report_together
from pipeline.config import PipelineConfig
from pipeline.gpus import environment_of, visible_gpus
from pipeline.options import PROGRAM


def gpu_environments(settings: PipelineConfig, count: int, *, alone: bool) -> list[dict[str, str]]:
    """The environment of a process per GPU; each sees its own one only.

    Raises:
        ConfigError: there are not so many GPUs, `cache.device` names one, or other options say otherwise (not `alone`).
    """
    import torch

    if not alone:
        raise ConfigError("--gpus goes with neither --part nor --repair nor --dry-run", do="give one of them at a time")

    there = torch.cuda.device_count()
    if not 0 < count <= there:
        raise ConfigError(
            f"--gpus {count}: {there} GPUs are visible here",
            do="give at most as many; without a GPU leave --gpus out, or divide the work with --num-parts and --part",
        )
    if settings.cache.device not in {"auto", "cuda"}:
        raise ConfigError(
            f"--gpus {count} with cache.device: {settings.cache.device}",
            do="set cache.device to auto: each gets its own",
        )
    return [environment_of(name) for name in visible_gpus()[:count]]


def cache_in_processes(
    settings: PipelineConfig,
    arguments: Sequence[str],
    split: str,
    environments: Sequence[dict[str, str]],
    should_stop: Callable[[], bool],
) -> str:
    """Cache a split with a process per environment, each a part of it; returns the figures of all together.

    Args:
        arguments: of the command line, after `cache` and without those about parts.

    Raises:
        PipelineError: a process failed; names it. What the others do is finished and kept.
        StoppedError: `should_stop` said so, and all processes have ended.
    """
    parts = [Part(index, len(environments)) for index in range(len(environments))]
    run_children(
        [
            Child(
                name=part.name,
                command=(*PROGRAM, "cache", *arguments, *part.options().split()),
                environment=environment,
                log=settings.output_dir / f"cache-{split}.{part.name}.log",
            )
            for part, environment in zip(parts, environments, strict=True)
        ],
        should_stop,
    )
    return report_together(settings, split, parts)


def verify(settings: PipelineConfig, split: str | None, progress: Progress) -> str:
    """Check the present configuration's cache; says what was checked.

    Raises:
        CacheError: lists what is damaged or missing, and the commands that mend it.
    """
    found = verify_cache(_folder_of(settings), progress, split=split)
    found.require_sound()
    entries = sum(len(shard.intact) for shard in found.shards)
    return (
        f"sound: {len(found.shards)} shards, {entries} entries, {found.num_bytes / 1e6:.2f} MB; "
        f"complete splits: {', '.join(found.missing) or 'none'}\n  cache {found.folder}"
    )


def repair(builder: CacheBuilder, settings: PipelineConfig, progress: Progress) -> str:
    """Move aside what is damaged and keep what is intact of it; says what was done. Encodes nothing.

    Raises:
        CacheError: there is no cache yet.
        ResourceError: the disk is full.
    """
    done = set_damaged_aside(builder.folder, FORMATS[settings.cache.format], settings.cache.shard_size, progress)
    lines = [
        f"moved aside        {len(done.moved)} damaged files",
        f"  kept             {done.kept_images} intact images of damaged shards",
        f"  to encode anew   {done.lost_images} images, of all splits",
    ]
    return "\n".join([*lines, *(f"  {file}" for file in done.moved)])


def prune(settings: PipelineConfig, *, fingerprint: str | None, leftovers: bool, yes: bool) -> str:
    """List what the cache folder holds, or delete what was named and confirmed.

    Raises:
        ConfigError: there is no such fingerprint.
        CacheError: something cannot be deleted.
    """
    wanted = expected_fingerprint(settings.model, settings.cache)
    any_backend = settings.cache.image_processor_backend == "auto"
    holdings = survey_holdings(settings.cache_dir, wanted, any_backend=any_backend)
    if fingerprint is not None and fingerprint not in {holding.folder.name for holding in holdings}:
        remove_fingerprint(holdings, fingerprint)  # says which there are
    lines = [holding.describe() for holding in holdings] or [f"nothing in {settings.cache_dir}"]
    if not yes or (fingerprint is None and not leftovers):
        lines.append("nothing was deleted; to delete give --fingerprint NAME or --leftovers, and --yes")
        return "\n".join(lines)
    lines = []
    if fingerprint is not None:
        gone = remove_fingerprint(holdings, fingerprint)
        lines.append(f"deleted {gone.folder}: {gone.num_images} images, {gone.num_bytes / 1e6:.2f} MB")
        holdings = [holding for holding in holdings if holding.folder.name != fingerprint]
    if leftovers:
        size = total_bytes([file for holding in holdings for file in (*holding.stale, *holding.damaged)])
        files = remove_leftovers(holdings)
        lines += [f"deleted {file}" for file in files]
        lines.append(f"deleted {len(files)} leftover files, {size / 1e6:.2f} MB")
        young = sum(len(holding.temporary) - len(holding.stale) for holding in holdings)
        if young:
            lines.append(f"kept {young} temporary files younger than an hour: a writer may be at work on them")
    return "\n".join(lines)


def repack(
    settings: PipelineConfig,
    output: Path | None,
    *,
    shard_format: str | None,
    shard_size: int | None,
    dtype: str | None,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Path:
    """Copy the configuration's cache into another format, shard size or storage dtype; returns the copy's folder.

    Raises:
        ConfigError, CacheError, ResourceError, StoppedError: see cache.repack.repack.
    """
    if dtype is not None and dtype not in get_args(StorageDtype):
        raise ConfigError(f"--dtype {dtype} is not known", do=f"choose one of: {', '.join(get_args(StorageDtype))}")
    any_backend = settings.cache.image_processor_backend == "auto"
    wanted = expected_fingerprint(settings.model, settings.cache)
    source = find_cache(settings.cache_dir, wanted, any_backend=any_backend)
    return repack_cache(
        source,
        output or settings.cache_dir,
        format=shard_format,
        shard_size=shard_size,
        dtype=cast("StorageDtype | None", dtype),
        progress=progress,
        should_stop=should_stop,
    )


def _folder_of(settings: PipelineConfig) -> Path:
    """The folder that the configuration reads, also when its manifest is damaged."""
    wanted = expected_fingerprint(settings.model, settings.cache)
    folder = settings.cache_dir / folder_name(wanted.name, settings.cache.format)
    if folder.is_dir() or settings.cache.image_processor_backend != "auto":
        return folder
    for other in fingerprint_folders(settings.cache_dir):
        try:
            fields = Fingerprint(load_manifest(other).fingerprint)
        except CacheError:
            continue
        if not fields.differences(wanted, ignore=BACKEND_FIELDS):
            return other
    return folder
