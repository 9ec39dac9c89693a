"""Whether everything that experiments have still to read is cached: asked before the first of them starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from cache.errors import CacheError
from cache.fingerprint import expected_fingerprint
from cache.remote import find_cache_at
from pipeline.allocation import Line
from pipeline.config import PipelineConfig
from pipeline.experiments import Experiment


def check_cached(
    settings: PipelineConfig,
    experiments: Sequence[Experiment],
    lines: Sequence[Line],
    splits: Sequence[str],
    again: Sequence[str],
) -> None:
    """Refuse where a training or an evaluation that is not done reads a split that is not completely cached.

    Args:
        lines: of the experiments, each with a step for every stage and then one for every split.
        splits: to evaluate.
        again: options of `pipeline cache` that name the configuration.

    Raises:
        CacheError: names the splits and the commands that cache them.
    """
    readers = _readers(experiments, lines, splits)
    if not readers:
        return
    try:
        cache = find_cache_at(
            settings.cache_source,
            expected_fingerprint(settings.model, settings.cache),
            any_backend=settings.cache.image_processor_backend == "auto",
        )
    except CacheError as error:
        needed = "".join(f"\n  split {split!r} is needed by {readers[split]}" for split in readers)
        raise CacheError(error.what + needed, where=error.where, do=_advice(settings, readers, again, error)) from None
    problems = {}
    for split in readers:
        try:
            cache.split(split)
        except CacheError as error:
            problems[split] = error
    if problems:
        told = "".join(f"\n  {error.what}; needed by {readers[split]}" for split, error in problems.items())
        first = next(iter(problems.values()))
        raise CacheError(
            f"not everything that is still to be read is cached, so nothing was started:{told}",
            where=first.where,
            do=_advice(settings, problems, again, first),
        )


def _readers(experiments: Sequence[Experiment], lines: Sequence[Line], splits: Sequence[str]) -> dict[str, str]:
    """Split -> the first step that has still to read it."""
    found: dict[str, str] = {}
    for experiment, line in zip(experiments, lines, strict=True):
        trainings = [(stage.settings.train.split, stage.settings.train.eval_split) for stage in experiment.stages]
        known = [stage.settings.data.splits for stage in experiment.stages]
        reads = [*zip(trainings, known, strict=True), *(((split,), known[-1]) for split in splits)]
        for step, (names, there) in zip(line.steps, reads, strict=True):
            if step.is_done():
                continue
            for name in names:
                # One that data.splits does not have is told by its own training; the others need not wait for that.
                if name is not None and name in there:
                    found.setdefault(name, step.name)
    return found


def _advice(settings: PipelineConfig, splits: Iterable[str], again: Sequence[str], error: CacheError) -> str:
    if not isinstance(settings.cache_source, Path):
        return error.do or "complete the cache where it was made"
    return ", then ".join(f"`{shlex.join(['pipeline', 'cache', *again, '--split', split])}`" for split in splits)
