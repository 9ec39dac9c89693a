"""Which jobs of a chain have nothing left to do, whoever did their work; imports torch."""

from __future__ import annotations

from pathlib import Path

from cache.progress import Progress
from pipeline.chain import Done, plan_jobs, splits_of
from pipeline.chain_state import find_done
from pipeline.config import PipelineConfig


def finished_jobs(settings: PipelineConfig, progress: Progress) -> frozenset[str]:
    """Names of the configuration's jobs that `pipeline submit` would not submit.

    Raises:
        PipelineError: a split, the model or the cache cannot be used.
    """
    nothing = Done(
        missing_parts=dict.fromkeys(splits_of(settings), (0,)),
        stages=frozenset(),
        evaluations=frozenset(),
        comparison=False,
    )
    done, _ = find_done(settings, progress)
    every, left = ({job.name for job in plan_jobs(settings, Path(), there)} for there in (nothing, done))
    return frozenset(every - left)
