"""What `pipeline eval` leaves in the run folder, and whether it is there for the adapter and settings of now."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.atomic import write_text
from pipeline.config import PipelineConfig
from train.adapter import adapter_digest
from train.run_folder import ADAPTER

if TYPE_CHECKING:
    from train.evaluate import Evaluation

PREDICTIONS_FILE, METRICS_FILE, MADE_FROM_FILE = "predictions.jsonl", "metrics.json", "made_from.json"


def evaluation_folder(settings: PipelineConfig, split: str, *, base: bool = False) -> Path:
    """Where the evaluation of a split lies."""
    return settings.output_dir / (f"eval-{split}-base" if base else f"eval-{split}")


def write_evaluation(folder: Path, result: Evaluation, made_from: dict[str, Any]) -> None:
    """Predictions, scores, and last of all what they were made from."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MADE_FROM_FILE).unlink(missing_ok=True)
    lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in result.predictions)
    write_text(folder / PREDICTIONS_FILE, lines)
    write_text(folder / METRICS_FILE, json.dumps(result.scores, indent=1))
    write_text(folder / MADE_FROM_FILE, json.dumps(made_from, indent=1))


def made_from(settings: PipelineConfig, split: str, adapter: Path | None) -> dict[str, Any]:
    """What decides an evaluation's scores.

    Args:
        adapter: None for the bare model.
    """
    return {
        "model": settings.model.model_dump(mode="json"),
        "adapter": adapter_digest(adapter) if adapter is not None else None,
        "data": {
            **settings.data.model_dump(mode="json", exclude={"splits"}),
            "split": settings.data.splits[split].model_dump(mode="json") if split in settings.data.splits else None,
        },
        "eval": settings.eval.model_dump(mode="json", exclude={"batch_size"}),
    }


def is_evaluated(settings: PipelineConfig, split: str) -> bool:
    """Whether the run folder holds the evaluation of its present adapter on a split."""
    folder = evaluation_folder(settings, split)
    try:
        there = json.loads((folder / MADE_FROM_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(there == made_from(settings, split, settings.output_dir / ADAPTER) and (folder / METRICS_FILE).exists())
