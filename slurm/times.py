"""Time limits as people and SLURM write them."""

from __future__ import annotations

import re

_CLOCK = re.compile(r"(?:(?P<d>\d+)-)?(?P<h>\d+):(?P<m>\d\d):(?P<s>\d\d)|(?P<days>\d+)-(?P<hours>\d\d?)")
_UNITS = re.compile(r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?:in)?)?(?:(?P<s>\d+)s)?")
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "days": 86400, "hours": 3600}


def parse_time(text: str) -> int:
    """Seconds of `6h`, `90m`, `1d12h`, `08:00:00` or `1-12:00:00`.

    Raises:
        ValueError: it is none of these, or no time at all.
    """
    for pattern in (_CLOCK, _UNITS):
        found = pattern.fullmatch(text)
        if found:
            seconds = sum(_SECONDS[unit] * int(number) for unit, number in found.groupdict().items() if number)
            if seconds > 0:
                return seconds
    raise ValueError("must be a time such as 6h, 90m, 1d12h or 08:00:00")


def slurm_time(seconds: float) -> str:
    """As #SBATCH --time takes it: D-HH:MM:SS, without the days where there are none."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
