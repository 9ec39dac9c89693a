"""How a verb ends: exit codes, one message for a user's mistake, a traceback only for ours, signals."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import typer

from cache.errors import CacheError, ConfigError, DataError, PipelineError, ResourceError, StoppedError
from pipeline.printed_commands import runnable
from slurm.errors import SlurmError

BUG = 1
STDERR = 2

# Part of the command line's contract; docs/configuration.md is written from it.
EXIT_CODES = {
    "0": "done",
    str(BUG): "a bug in the program; a traceback is shown",
    str(ConfigError.exit_code): "configuration or command line: a setting, an option, a path, a model",
    str(DataError.exit_code): "data: a split's file, a record or an image that cannot be used",
    str(CacheError.exit_code): "cache: missing, incomplete, damaged, or made by something else",
    str(ResourceError.exit_code): "memory or disk ran out, or a file that is there cannot be read now",
    str(SlurmError.exit_code): "SLURM is missing, does not answer, or refused something",
    "128 + n": "ended by signal n (143: SIGTERM, 130: SIGINT, 138: SIGUSR1); the same command goes on from there",
}

# Recent versions of typer bring a click of their own, older ones import click: only its subclass is found in both.
_UsageError: type[BaseException] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_USERS_FILES = (PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
# Libraries that write through C++ or Rust report a full disk by their own exceptions, without an errno.
_DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed writing",
    ". unexpected pos ",
)
_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class StopRequest:
    """Callable: whether a signal has asked the work to end at the next safe point. A second one ends it at once.

    The same SIGTERM or SIGUSR1 once more within ECHO_SECONDS is no second one: where processes were started for parts
    of the work, a scheduler signals each of them, and the parent hands the signal on as well.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ECHO_SECONDS = 2.0

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0

    def __call__(self) -> bool:
        return self.received is not None

    def install(self) -> StopRequest:
        """Take over the signals."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            if number == self.received != signal.SIGINT and time.monotonic() - self._since < self.ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        self.received, self._since = signal.Signals(number), time.monotonic()
        # Past sys.stderr: the signal may have come while that was being written to, and it must not be entered twice.
        with suppress(OSError):
            os.write(STDERR, f"{self.received.name}: stopping at the next safe point\n".encode())

    @property
    def exit_code(self) -> int:
        """128 + signal number, as a shell reports it."""
        return 128 + (self.received or signal.SIGINT)


stop_request = StopRequest()


def exit_code_of(work: Callable[[], object]) -> int:
    """Run a verb; report its error, if any, on stderr and return the exit code."""
    try:
        code = work()
    except (KeyboardInterrupt, Exception) as error:
        return _report(error)
    # typer turns an interruption and `raise Exit` into a returned exit code; the verbs themselves return None.
    if code == 128 + signal.SIGINT:
        return _report(KeyboardInterrupt())
    return code if isinstance(code, int) else 0


def leave(code: int) -> NoReturn:
    """End this process; one of several does so without taking the interpreter apart.

    Threads of torch outlive the process group and can deadlock with an interpreter that ends
    (https://github.com/pytorch/pytorch/issues/190489); the scheduler would wait for that process until the time limit.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        atexit._run_exitfuncs()  # loggers of experiments end their runs there
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _report(error: BaseException) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, _UsageError):
        error.show()  # type: ignore[attr-defined]
        return ConfigError.exit_code
    if isinstance(error, typer.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__  # typer takes the end of any file for that of the terminal
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("stopped at once; what was committed is kept")
        return stop_request.exit_code
    if isinstance(error, SlurmError):
        _say(f"error: {runnable(str(error))}")
        return error.exit_code
    if isinstance(error, PipelineError) and not isinstance(error, StoppedError):
        _say(f"error: {runnable(_told(error))}")
        return error.exit_code
    # A signal that reached the worker processes as well may have ended them before this one came to a safe point.
    if isinstance(error, StoppedError) or (stop_request() and _lost_worker(error)):
        _say(str(error) if isinstance(error, StoppedError) else "stopped; run the same command to go on")
        return stop_request.exit_code
    known = _as_pipeline_error(error)
    if known is None:
        traceback.print_exception(error)
        _say("This is a bug in the program, not a mistake of yours. Please report it with the lines above.")
        return BUG
    _say(f"error: {known}")
    return known.exit_code


def _told(error: PipelineError) -> str:
    """The message; an error of a data-loader worker arrives as its whole traceback, which ends with the message."""
    kind = type(error)
    return str(error).rpartition(f"\n{kind.__module__}.{kind.__qualname__}: ")[2].rstrip("\n")


def _as_pipeline_error(error: BaseException) -> PipelineError | None:
    """What a library's error means to the user; None when it can only be a bug."""
    if _is_full_disk(error):
        path = getattr(error, "filename", None)
        return ResourceError(
            "the disk (or your quota) is full",
            where=str(path) if path else None,
            do="free some space, then run the same command again: it goes on where it was",
        )
    if _is_out_of_memory(error):
        return ResourceError(
            f"the memory does not suffice: {_first_line(error)}",
            do="lower eval.batch_size (eval), train.tokens_per_pack (train) or cache.max_pixels (any verb)",
        )
    if isinstance(error, MemoryError):
        return ResourceError(
            "the machine's memory does not suffice",
            do="lower cache.shard_size, cache.num_workers and train.dataloader_num_workers",
        )
    if _lost_worker(error):
        return ResourceError(
            f"a worker process was ended from outside, most often because memory ran out: {_first_line(error)}",
            do="lower cache.num_workers or train.dataloader_num_workers, or ask for more memory",
        )
    if isinstance(error, ImportError) and "install" in str(error):  # an optional library behind a setting
        return ConfigError(_first_line(error), do="install it, or choose another value of the setting that needs it")
    if isinstance(error, OSError) and (isinstance(error, _USERS_FILES) or error.errno == errno.EROFS):
        return ConfigError(
            error.strerror or str(error),
            where=str(error.filename) if error.filename else None,
            do="check output_dir, cache.dir and the permissions of their folders",
        )
    return None


def _is_full_disk(error: BaseException) -> bool:
    return any(
        (isinstance(cause, OSError) and cause.errno in {errno.ENOSPC, errno.EDQUOT})
        or any(text in str(cause) for text in _DISK_FULL)
        for cause in _chain(error)
    )


def _is_out_of_memory(error: BaseException) -> bool:
    # torch is named by its text: importing it here would cost every --help seconds.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def _lost_worker(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]


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


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
