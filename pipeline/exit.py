"""How a verb ends: exit codes, one message for a user's mistake, a traceback only for ours, signals.

0 done, 1 a bug, 2 configuration, 3 data, 4 cache, 5 memory or disk, 128 + n ended by signal n.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType

import click

from cache.errors import PipelineError, StoppedError

BUG = 1


class StopRequest:
    """Callable: whether a signal has asked the work to end at the next safe point. A second one ends it at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.received is not None

    def install(self) -> StopRequest:
        """Take over the signals."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        sys.stderr.write(f"{self.received.name}: stopping at the next safe point\n")

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports it."""
        return 128 + (self.received or signal.SIGINT)


stop_request = StopRequest()


def exit_code_of(work: Callable[[], object]) -> int:
    """Run a verb; report its error, if any, on stderr and return the exit code."""
    try:
        work()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except StoppedError as error:
        _say(str(error))
        return stop_request.exit_code
    except PipelineError as error:
        _say(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("stopped at once; what was committed is kept")
        return stop_request.exit_code
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            return _bug()
        _say(
            f"error: the disk (or your quota) is full: {error.filename or error}\n  What to do: free some space, then "
            "run the same command again: it goes on where it was"
        )
        return 5
    except MemoryError:
        _say(
            "error: the machine's memory does not suffice\n  What to do: lower cache.shard_size and the loader workers"
        )
        return 5
    except Exception:
        return _bug()
    return 0


def configure_logging() -> None:
    """Our own log lines on stderr with the time; of the libraries only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", datefmt="%H:%M:%S"))
    for name in ("train", "cache", "pipeline"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    # Libraries' deprecation notes are for this program's authors, who see them as errors in the tests.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def _bug() -> int:
    traceback.print_exc()
    _say("This is a bug in the program, not a mistake of yours. Please report it with the lines above.")
    return BUG


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
