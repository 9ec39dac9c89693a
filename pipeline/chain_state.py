"""What of a chain is finished, found in the cache and the run folders; imports torch."""

from __future__ import annotations

from pathlib import Path

from cache.build import CacheBuilder
from cache.errors import CacheError
from cache.fingerprint import expected_fingerprint
from cache.index import EntryIndex
from cache.parts import part_of
from cache.progress import Progress
from cache.remote import find_cache_at
from cache.split_files import load_refused, load_split
from pipeline.chain import Done, eval_split_of, splits_of
from pipeline.comparison import NAME
from pipeline.config import PipelineConfig
from pipeline.evaluations import MADE_FROM_FILE, evaluation_folder, is_evaluated
from pipeline.experiments import Experiment, experiments_of
from pipeline.options import job_of
from train.job import is_finished
from train.run_folder import RUN_FILE


def find_done(settings: PipelineConfig, progress: Progress) -> tuple[Done, Path | None]:
    """What is finished, and the folder of the features (None where they are read from an address).

    Raises:
        PipelineError: a split, the model or the cache cannot be used.
    """
    missing: dict[str, tuple[int, ...]] = {}
    folder = None
    if isinstance(settings.cache_source, Path):
        builder = CacheBuilder(settings.model, settings.data, settings.cache, settings.cache_dir)
        folder = builder.folder
        count = settings.slurm.cache.num_parts
        parts = {split: _missing(builder, split, count, progress) for split in splits_of(settings)}
        missing = {split: left for split, left in parts.items() if left}
    experiments = experiments_of(settings)
    stages = frozenset(
        stage.label
        for experiment in experiments
        for stage in experiment.stages
        if is_finished(job_of(stage.settings, from_cache=True))
    )
    split = eval_split_of(settings)
    evaluated = frozenset(
        experiment.name
        for experiment in experiments
        if split is None or is_evaluated(experiment.stages[-1].settings, split)
    )
    return Done(missing, stages, evaluated, _is_compared(settings, experiments)), folder


def check_cache(settings: PipelineConfig, splits: list[str]) -> str:
    """Whether all images of these splits (default: all that training and evaluation need) are cached.

    Raises:
        CacheError: some are not; names the parts to run again.
    """
    source = find_cache_at(
        settings.cache_source,
        expected_fingerprint(settings.model, settings.cache),
        any_backend=settings.cache.image_processor_backend == "auto",
    )
    problems: list[CacheError] = []
    lines = []
    for split in splits or splits_of(settings):
        try:
            images = source.split(split).images
            lines.append(f"split {split}: all {len({image.key for image in images})} distinct images are cached")
        except CacheError as error:
            problems.append(error)
    if problems:
        raise CacheError(
            "\n  ".join(error.what for error in problems),
            where=problems[0].where,
            do="; ".join(error.do or "" for error in problems),
        )
    return "\n".join(lines)


def _missing(builder: CacheBuilder, split: str, count: int, progress: Progress) -> tuple[int, ...]:
    """The parts with work left. A split that nobody has begun is not looked at: its images are for the jobs to read."""
    listed = load_split(builder.folder, split)
    if listed is None:
        return tuple(range(count))
    entries = EntryIndex.open(builder.folder)
    missing = {image.key for image in listed.images if image.key not in entries}
    if not missing:
        # Rows may have been added since.
        refused = load_refused(builder.folder).keys()
        todo = builder.plan(split, progress).todo
        missing = {image.key for image, _ in todo if image.key not in refused and image.path not in listed.refused}
    return tuple(sorted({part_of(key, count) for key in missing}))


def _is_compared(settings: PipelineConfig, experiments: tuple[Experiment, ...]) -> bool:
    folders = [experiment.stages[-1].settings for experiment in experiments]
    split = eval_split_of(settings)
    sources = [
        s.output_dir / RUN_FILE if split is None else evaluation_folder(s, split) / MADE_FROM_FILE for s in folders
    ]
    return _newer(settings.output_dir / f"{NAME}.md", sources)


def _newer(file: Path, sources: list[Path]) -> bool:
    """Whether the file and all its sources are there and it is at least as new as each of them."""
    if not file.is_file() or not all(source.exists() for source in sources):
        return False
    return all(source.stat().st_mtime_ns <= file.stat().st_mtime_ns for source in sources)
