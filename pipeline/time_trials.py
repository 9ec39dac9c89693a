"""Row lengths and activation checkpointing that a calibration of training has tried, and how long a step took."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import PipelineConfig
from pipeline.time_records import TimeRecord
from train.calibrate import CALIBRATION_FILE


@dataclass(frozen=True, slots=True)
class Trial:
    """One that fits into memory. Seconds are those of the heaviest step."""

    tokens_per_pack: int
    gradient_checkpointing: bool
    seconds: float

    @property
    def setting(self) -> str:
        """As it stands in a configuration."""
        recompute = str(self.gradient_checkpointing).lower()
        return f"train.tokens_per_pack: {self.tokens_per_pack}, train.gradient_checkpointing: {recompute}"


@dataclass(frozen=True, slots=True)
class Trials:
    """Attributes:
    current: the one that is set, or that `auto` takes; None where it was not tried.
    faster: than the current one, the least gain first.
    """

    current: Trial | None
    faster: tuple[Trial, ...]


def trials_of(settings: PipelineConfig, records: Sequence[TimeRecord]) -> Trials:
    """Of the run folder's own calibration, else of the newest one that is recorded."""
    content = _own(settings) or next((record.trials for record in records if record.trials), ())
    return choose_trials(content, settings.train.tokens_per_pack, settings.train.gradient_checkpointing or False)


def choose_trials(content: Sequence[Mapping[str, Any]], tokens_per_pack: int | str, checkpointing: bool) -> Trials:
    """From trials as JSON.

    Args:
        tokens_per_pack, checkpointing: as set; `auto` has taken the fastest.
    """
    tried = [
        Trial(int(one["tokens_per_pack"]), bool(one["gradient_checkpointing"]), float(one["seconds"]))
        for one in content
        if one.get("seconds")
    ]
    tried.sort(key=lambda trial: trial.seconds)
    if tokens_per_pack == "auto":
        return Trials(tried[0] if tried else None, ())
    alike = [trial for trial in tried if trial.gradient_checkpointing == checkpointing]
    # Rows of another length than those that were tried are taken for the nearest shorter ones.
    below = [trial for trial in alike if trial.tokens_per_pack <= int(tokens_per_pack)]
    current = max(below or alike[:1], key=lambda trial: trial.tokens_per_pack, default=None)
    if current is None:
        return Trials(None, ())
    return Trials(current, tuple(t for t in reversed(tried) if t.seconds < current.seconds))


def _own(settings: PipelineConfig) -> Sequence[Mapping[str, Any]]:
    try:
        content = json.loads((settings.output_dir / CALIBRATION_FILE).read_text(encoding="utf-8"))
        return list(content["trials"])
    except (OSError, ValueError, KeyError, TypeError):
        return []  # nothing was tried here
