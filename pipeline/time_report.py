"""What `pipeline plan --time-limit` prints."""

from __future__ import annotations

import json
from collections.abc import Callable

from cache.errors import ConfigError
from cache.progress import Progress
from pipeline.config import PipelineConfig
from pipeline.time_advice import advise, describe, families
from pipeline.time_calibrate import calibrate
from pipeline.time_chain import TimedChain
from pipeline.time_plan import how_to_measure
from slurm.times import parse_time


def time_report(
    settings: PipelineConfig,
    progress: Progress,
    should_stop: Callable[[], bool],
    *,
    limit: str | None,
    steps: int | None,
    as_json: bool,
) -> str:
    """The times of all jobs that are not finished, and what would make them fit.

    Args:
        limit: as on the command line: of every job and of the whole; None or `config` for the jobs' own.
        steps: of a calibration that is to be made first; None for none.

    Raises:
        ConfigError: `limit` is no time.
        PipelineError: the model, the data or the cache cannot be used, as in `pipeline submit`.
        StoppedError: `should_stop` said so.
    """
    seconds = limit_of(limit)
    if steps is not None:
        calibrate(settings, steps, progress, should_stop)
    return report_times(settings, progress, seconds, as_json=as_json)


def limit_of(text: str | None) -> float | None:
    """Seconds of --time-limit; None for the jobs' own limits.

    Raises:
        ConfigError: it is no time.
    """
    if text is None or text == "config":
        return None
    try:
        return float(parse_time(text))
    except ValueError as error:
        raise ConfigError(f"--time-limit {text}: {error}", do="write it as in --time-limit 6h") from None


def report_times(settings: PipelineConfig, progress: Progress, time_limit: float | None, *, as_json: bool) -> str:
    """The times of all jobs that are not finished, and what would make them fit.

    Args:
        time_limit: seconds, instead of every job's own limit and for the whole; None for the jobs' own.

    Raises:
        PipelineError: the model, the data or the cache cannot be used, as in `pipeline submit`.
    """
    chain = TimedChain(settings, progress, time_limit)
    plan = chain.plan()
    advice = advise(plan, families(chain, plan))
    if as_json:
        return json.dumps({**plan.figures(), "advice": [one.figures() for one in advice]}, indent=1, ensure_ascii=False)
    if not plan.jobs:
        return "nothing to do: everything is finished"
    lines = [plan.describe()]
    if not plan.known and not plan.without_figure:
        lines.append(f"there is no figure for all of it yet: {how_to_measure()}")
    return "\n".join([*lines, *filter(None, [describe(plan, advice)])])
