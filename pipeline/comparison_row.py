"""What a comparison says of one experiment."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN_LOSS, STEPS, SECONDS, RATE = "final train loss", "steps", "training time (s)", "samples/s"
OF_TRAINING = (TRAIN_LOSS, STEPS, SECONDS, RATE)


@dataclass(frozen=True, slots=True)
class Row:
    """An experiment.

    Attributes:
        values: metric -> value; a metric that is missing or not a finite number is not in it.
        losses: (step, training loss), the steps of all stages counted on.
        missing: what is not there (yet), in words.
        finished: all its stages are; if not, what training gave and took is that so far.
    """

    experiment: str
    stages: tuple[str, ...]
    values: dict[str, float]
    losses: list[tuple[float, float]]
    missing: tuple[str, ...]
    finished: bool = True

    def is_so_far(self, metric: str) -> bool:
        """Whether the value of a metric is that of a training which is not finished."""
        return not self.finished and metric in OF_TRAINING and metric in self.values
