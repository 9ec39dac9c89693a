"""What SLURM refuses or cannot do, in its own words, and what to do about it."""

from __future__ import annotations


class SlurmError(Exception):
    """SLURM is missing, does not answer, or refused something. Printed as one message, without a traceback."""

    exit_code = 6

    def __init__(self, what: str, *, where: str | None = None, do: str) -> None:
        self.what, self.where, self.do = what, where, do
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{what}\n  What to do: {do}")


class NoAnswerError(SlurmError):
    """SLURM did not answer in time: what was asked of it may have been done all the same."""
