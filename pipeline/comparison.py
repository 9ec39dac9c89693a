"""All experiments of a file side by side: a table as Markdown and CSV, and a picture. What is missing is said."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache.atomic import write_text
from cache.errors import ConfigError, DataError
from pipeline.comparison_picture import draw
from pipeline.comparison_row import OF_TRAINING, RATE, SECONDS, STEPS, TRAIN_LOSS, Row
from pipeline.evaluations import METRICS_FILE, evaluation_folder, is_evaluated
from pipeline.experiments import Experiment, Stage
from pipeline.options import job_of
from train.job import is_finished
from train.run_folder import METRICS_FILE as STEPS_FILE

NAME = "comparison"


def write_comparison(folder: Path, experiments: Sequence[Experiment], splits: Sequence[str]) -> str:
    """Write comparison.md, comparison.csv and comparison.svg into a folder; returns the table and where they are.

    Raises:
        DataError: a metrics file is damaged.
    """
    found = [row_of(experiment, splits) for experiment in experiments]
    metrics = metrics_of(found, splits)
    rows = [replace(row, missing=(*row.missing, *_not_measured(row, metrics, splits))) for row in found]
    table = markdown(rows, metrics)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{NAME}.md", f"# Comparison of experiments\n\n{table}\n")
    write_text(folder / f"{NAME}.csv", as_csv(rows, metrics))
    write_text(folder / f"{NAME}.svg", draw(rows, metrics))
    files = ", ".join(str(folder / f"{NAME}.{kind}") for kind in ("md", "csv", "svg"))
    return f"{table}\n\nwritten: {files}"


def row_of(experiment: Experiment, splits: Sequence[str]) -> Row:
    """An experiment's metrics: scores and final loss of its last stage; steps, time and rate over all its stages."""
    missing: list[str] = []
    losses: list[tuple[float, float]] = []
    steps = seconds = samples = 0.0
    for stage in experiment.stages:
        lines = _training_lines(stage)
        losses += [(steps + line["step"], float(line["loss"])) for line in lines]
        missing += _not_finished(stage, lines)
        steps += lines[-1]["step"] if lines else 0
        timed = [line for line in lines if "seconds" in line]
        seconds += sum(line["seconds"] for line in timed)
        samples += sum(line["seconds"] * line["samples_per_second"] for line in timed)
    finished = not missing
    last = experiment.stages[-1]
    values = {STEPS: steps} if steps else {}
    if lines:  # of the last stage
        values[TRAIN_LOSS] = float(lines[-1]["loss"])
    if seconds:
        values |= {SECONDS: seconds, RATE: samples / seconds}
    for split in splits:
        values |= _scores(last, split, missing)
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    missing += [f"{name} is {values[name]}" for name in values.keys() - finite.keys()]
    return Row(
        experiment.name, tuple(stage.name for stage in experiment.stages), finite, losses, tuple(missing), finished
    )


def metrics_of(rows: Sequence[Row], splits: Sequence[str]) -> list[str]:
    """The columns: scores in the order in which they first come, then what training took."""
    scores = dict.fromkeys(name for row in rows for name in row.values if name not in OF_TRAINING)
    expected = [f"{split} loss" for split in splits]
    return [*dict.fromkeys([*expected, *scores]), *OF_TRAINING]


def markdown(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """The table, its columns aligned, and what is missing below it."""
    head = ["experiment", "stages", *map(_in_a_line, metrics)]
    body = [[row.experiment or "-", " > ".join(filter(None, row.stages)) or "-", *_cells(row, metrics)] for row in rows]
    widths = [max(len(line[place]) for line in [head, *body]) for place in range(len(head))]
    ruler = ["-" * width if place < 2 else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if p < 2 else c.rjust(w) for p, (c, w) in enumerate(zip(line, widths, strict=True)))
        + " |"
        for line in [head, ruler, *body]
    ]
    told = [f"- {row.experiment or 'the run'}: {_in_a_line(what)}" for row in rows for what in row.missing]
    return "\n".join([*lines, *(["", "Missing:", "", *told] if told else [])])


def _in_a_line(text: str) -> str:
    """Names of metrics hold those of the stages of answers, which come from the data and may be any text."""
    return " ".join(text.splitlines()).replace("\\", "\\\\").replace("|", "\\|")


def as_csv(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """The table with all digits; an empty cell is a missing value, and the last columns say why and what is so far."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["experiment", "stages", *metrics, "missing", "so far"])
    for row in rows:
        numbers = [repr(row.values[name]) if name in row.values else "" for name in metrics]
        so_far = "; ".join(name for name in metrics if row.is_so_far(name))
        writer.writerow([row.experiment, " > ".join(row.stages), *numbers, "; ".join(row.missing), so_far])
    return out.getvalue()


def _not_measured(row: Row, metrics: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Scores that others have and an experiment lacks though it was evaluated: its evaluation gives none."""
    evaluated = [split for split in splits if f"{split} loss" in row.values]
    return [
        f"its evaluation has no {metric}"
        for metric in metrics
        if metric not in row.values and any(metric.startswith(f"{split} ") for split in evaluated)
    ]


def _cells(row: Row, metrics: Sequence[str]) -> list[str]:
    return [_shown(row, name) if name in row.values else "missing" for name in metrics]


def _shown(row: Row, name: str) -> str:
    digits = {STEPS: 0, SECONDS: 1, RATE: 2}.get(name, 4)
    return f"{row.values[name]:.{digits}f}{' so far' if row.is_so_far(name) else ''}"


def _scores(stage: Stage, split: str, missing: list[str]) -> dict[str, float]:
    """`<split> <metric>` -> value of the stage's evaluation."""
    file = evaluation_folder(stage.settings, split) / METRICS_FILE
    if not is_evaluated(stage.settings, split):
        stale = "the evaluation there is of another adapter, or with other settings" if file.exists() else ""
        missing.append(f"{split} is not evaluated{f': {stale}' if stale else ''}")
        return {}
    scores = _json(file, file.read_text(encoding="utf-8"))
    return {f"{split} {name}": float(value) for name, value in scores.items()}


def _not_finished(stage: Stage, lines: Sequence[dict[str, Any]]) -> list[str]:
    name = stage.name or "training"
    try:
        if any(is_finished(job_of(stage.settings, from_cache=cached)) for cached in (True, False)):
            return []
    except ConfigError as error:
        return [f"whether {name} is finished: {error.where} {error.what}"]
    at = f" (at step {lines[-1]['step']:.0f})" if lines else ""
    return [f"{name} is not finished{at}"]


def _training_lines(stage: Stage) -> list[dict[str, Any]]:
    """The lines of training steps; a last line that is still being written is left out."""
    file = stage.settings.output_dir / STEPS_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    whole = text[: text.rfind("\n") + 1].splitlines()
    lines = [_json(Path(f"{file}:{number}"), line) for number, line in enumerate(whole, 1)]
    return [line for line in lines if "samples_per_second" in line]


def _json(place: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise DataError(f"is damaged: {error}", where=str(place), do="remove the file's damaged part") from None
    if not isinstance(content, dict):
        raise DataError("is damaged: not a JSON object", where=str(place), do="remove the file's damaged part")
    return content
