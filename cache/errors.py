"""The errors that a user can meet. Each says what is wrong, with which value, where, and what to do next.

`exit_code` is part of the command line's contract (docs/configuration.md); scripts rely on it.
"""

from __future__ import annotations


class PipelineError(Exception):
    """A mistake or a limit that the user can act on. Printed as one message, without a traceback."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, do: str | None = None) -> None:
        self.what, self.where, self.do = what, where, do
        super().__init__(str(self))

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f"\n  What to do: {self.do}" if self.do else ""
        return f"{place}{self.what}{advice}"

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields are lost by the default protocol, and data-loader workers hand errors over by it.
        return _rebuild, (type(self), self.what, self.where, self.do)


def _rebuild(kind: type[PipelineError], what: str, where: str | None, do: str | None) -> PipelineError:
    return kind(what, where=where, do=do)


class ConfigError(PipelineError, ValueError):
    """A setting that is unknown, impossible, or contradicts another."""

    exit_code = 2


class DataError(PipelineError, ValueError):
    """A record or an image that cannot be used."""

    exit_code = 3


class CacheError(PipelineError):
    """A cache that is missing, incomplete, damaged, or made by something else."""

    exit_code = 4


class ResourceError(PipelineError, RuntimeError):
    """Memory or disk ran out."""

    exit_code = 5


class ReadError(ResourceError):
    """A file that is there cannot be read now: permissions, or a disk or network file system that fails.

    Never a reason to leave a record out: tried again, the same file may be fine.
    """


class StoppedError(PipelineError):
    """Asked to stop by a signal. What was committed counts; the same command goes on from there."""
