"""A job that was told to stop goes back into SLURM's queue by itself."""

from __future__ import annotations

import os
import signal
import sys
import time

from pipeline.exit import StopRequest
from pipeline.printed_commands import runnable
from slurm.client import SlurmClient
from slurm.environment import OwnJob
from slurm.errors import SlurmError

# Set by the scripts of `pipeline submit`. Without it a command typed inside a job leaves that job alone.
VARIABLE = "PIPELINE_MAX_REQUEUES"
# A process of torchrun that ends makes it end the others, also the one that is talking to SLURM.
_WAIT_SECONDS = 60.0


def take_limit() -> int | None:
    """How often this job may be put back into the queue; None where the command is not a job's own.

    Processes that this one starts do not see it any more: they hand their stop to this one.
    """
    text = os.environ.pop(VARIABLE, None)
    return int(text) if text is not None and text.isdigit() else None


def requeue_if_asked(limit: int, stop: StopRequest, code: int) -> None:
    """Put the job back into the queue when the work has ended because of USR1.

    SIGTERM is left to SLURM: it comes with a cancellation, which must hold, and with a preemption, which requeues.

    Args:
        limit: how often in all.
        code: how the work ended.
    """
    job = OwnJob.of(os.environ)
    if stop.received != signal.SIGUSR1 or code != stop.exit_code or job is None:
        return
    if int(os.environ.get("RANK", "0")) != 0:
        time.sleep(_WAIT_SECONDS)
        return
    if job.restarts >= limit:
        _say(f"job {job.id} was put back into the queue {job.restarts} times already (slurm.max_requeues: {limit})")
        _say(runnable("run `pipeline submit` again to go on"))
        return
    # The end of this process is SLURM's now, and comes by these signals.
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        SlurmClient().requeue(job.id)
    except SlurmError as error:
        _say(runnable(f"{error}\n  The work so far is kept: `pipeline submit` goes on with it."))
        return
    _say(f"job {job.id} goes back into the queue, for the {job.restarts + 1}. time of at most {limit}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
