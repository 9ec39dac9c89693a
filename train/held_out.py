"""What an evaluation goes over: loss and answers of the same records."""

from __future__ import annotations

from dataclasses import dataclass

from cache.errors import ConfigError
from cache.progress import Progress
from train.dataset import Samples
from train.inputs import Inputs
from train.job import Job


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The samples of an evaluation.

    Attributes:
        measured: those of the loss.
        prompts: of the same records in the same order, for the answers; empty where none are generated.
    """

    measured: Samples
    prompts: Samples

    @classmethod
    def read(cls, inputs: Inputs, split: str, progress: Progress, *, answers: bool, limit: int | None) -> HeldOut:
        """Read a split.

        Args:
            answers: whether answers are generated too.
            limit: the first so many records that can be used both ways; without answers all are.

        Raises:
            DataError: see SampleBuilder.training.
        """
        known = inputs.known(split, progress)
        measured = inputs.samples.training(split, known, progress)
        if not answers:
            return cls(measured, Samples([], [], []))
        prompts = inputs.samples.prompts(split, known, progress)
        return cls(measured.also_in(prompts).first(limit), prompts.also_in(measured).first(limit))


def has_eval_split(job: Job) -> bool:
    """Whether a run is evaluated while it trains.

    Raises:
        ConfigError: `train.eval_split` was given and is no split.
    """
    split = job.train.eval_split
    if split is None or split in job.data.splits:
        return split is not None
    if "eval_split" in job.train.model_fields_set:
        raise ConfigError(
            f"train.eval_split is {split!r}, but data.splits names only {', '.join(job.data.splits)}",
            do="name one of them, or set train.eval_split: null",
        )
    return False
