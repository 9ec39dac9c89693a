"""The metric by which checkpoints are compared: its names, which way is better, whether a split will give it."""

from __future__ import annotations

from collections.abc import Sequence

from cache.errors import ConfigError
from cache.records import Record, Text
from train.metrics import answer_of, parse_point

OF_ANSWERS = ("exact_match", "token_f1", "point_accuracy")
_OF_A_STAGE = "loss_"


def is_metric(name: str) -> bool:
    """Whether an evaluation may give it: `loss`, a score of answers, or `loss_<stage>`."""
    return name == "loss" or name in OF_ANSWERS or (name.startswith(_OF_A_STAGE) and name != _OF_A_STAGE)


def needs_answers(metric: str) -> bool:
    """Whether answers must be generated for it."""
    return metric in OF_ANSWERS


def greater_is_better(metric: str) -> bool:
    """Losses are better the lower they are."""
    return metric in OF_ANSWERS


def require_given(metric: str, split: str, records: Sequence[Record]) -> None:
    """Check that evaluating these records gives the metric.

    Args:
        records: of the evaluation split, as many as are evaluated.

    Raises:
        ConfigError: no answer is a point, or no record has the stage.
    """
    name, where = f"train.metric_for_best_model: {metric}", f"the evaluation split {split!r}"
    if metric == "point_accuracy" and not any(parse_point(answer_of(record)) for record in records):
        raise ConfigError(
            f"{name} needs answers that are points, and none of the {len(records)} records of {where} has one",
            do="set it to loss, exact_match or token_f1",
        )
    if metric.startswith(_OF_A_STAGE):
        stages = _stages(records)
        if metric.removeprefix(_OF_A_STAGE) not in stages:
            there = ", ".join(f"{_OF_A_STAGE}{stage}" for stage in stages) or "none, its answers have no stages"
            raise ConfigError(f"{name}: {where} has no such stage; there are: {there}", do="set it to one, or to loss")


def _stages(records: Sequence[Record]) -> list[str]:
    """The names of stages that are learned, in their order."""
    turns = [turn for record in records for turn in record.turns if turn.role == "assistant"]
    parts = [part for turn in turns for part in turn.content if isinstance(part, Text) and part.weight > 0]
    return list(dict.fromkeys(part.stage for part in parts if part.stage is not None))
