"""The comparison as a picture: loss curves on top, below them a bar chart for each metric. SVG, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.comparison_row import Row
from pipeline.report import round_ticks, short_number

WIDTH, MARGIN, GAP = 1000, 24, 28
CURVES_HEIGHT, BAR, LABEL = 300, 22, 130  # a bar's line, and the space for the experiments' names in front of it
COLUMNS, KEY_COLUMNS = 2, 3
MOST_POINTS = 400  # of a curve: more are not seen
# Distinct also to most colour-blind readers (Okabe and Ito), on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a00")


def draw(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """An SVG file: the curves of training loss, and a panel of bars for each metric."""
    import jinja2

    names = [row.experiment or "the run" for row in rows]
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(rows))]
    curves = _curves(rows, colours)
    keys: list[dict[str, Any]] = [
        {
            "name": name,
            "colour": colour,
            "x": MARGIN + place % KEY_COLUMNS * (WIDTH - MARGIN) // KEY_COLUMNS,
            "y": CURVES_HEIGHT + MARGIN + 8 + 20 * (place // KEY_COLUMNS),
        }
        for place, (name, colour) in enumerate(zip(names, colours, strict=True))
    ]
    top = (keys[-1]["y"] + GAP) if curves else MARGIN
    panel_height = 30 + BAR * len(rows)
    panels = []
    for place, metric in enumerate(metrics):
        x = MARGIN + place % COLUMNS * (WIDTH - MARGIN) / COLUMNS
        y = top + place // COLUMNS * (panel_height + GAP)
        panels.append({"title": metric, "x": x, "y": y, "bars": _bars(rows, metric, names, colours)})
    height = top + -(-len(metrics) // COLUMNS) * (panel_height + GAP)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("comparison.svg.jinja").render(
        width=WIDTH,
        height=height,
        margin=MARGIN,
        label=LABEL,
        curves=curves,
        keys=keys,
        panels=panels,
    )


def _bars(rows: Sequence[Row], metric: str, names: list[str], colours: list[str]) -> list[dict[str, Any]]:
    longest = max((abs(row.values[metric]) for row in rows if metric in row.values), default=0.0) or 1.0
    room = (WIDTH - MARGIN) / COLUMNS - MARGIN - LABEL - 90
    bars = []
    for place, (row, name, colour) in enumerate(zip(rows, names, colours, strict=True)):
        value = row.values.get(metric)
        bars.append(
            {
                "name": name if len(name) <= 18 else f"{name[:17]}…",
                "y": 30 + BAR * place,
                "length": round(abs(value) / longest * room, 1) if value is not None else 0,
                "colour": colour,
                "text": "missing" if value is None else f"{_figure(value)}{' so far' if row.is_so_far(metric) else ''}",
            }
        )
    return bars


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _curves(rows: Sequence[Row], colours: list[str]) -> dict[str, Any] | None:
    points = [[(x, y) for x, y in row.losses if math.isfinite(y)] for row in rows]
    every = [point for line in points for point in line]
    if not every:
        return None
    across = round_ticks(0.0, max(x for x, _ in every))
    upward = round_ticks(min(0.0, *(y for _, y in every)), max(y for _, y in every))
    left, right, bottom = MARGIN + 40, WIDTH - MARGIN, CURVES_HEIGHT - 30

    def at_x(step: float) -> float:
        return round(left + (step - across[0]) / (across[-1] - across[0]) * (right - left), 1)

    def at_y(value: float) -> float:
        return round(bottom - (value - upward[0]) / (upward[-1] - upward[0]) * (bottom - 50), 1)

    return {
        "left": left,
        "right": right,
        "bottom": bottom,
        "across": [(at_x(tick), short_number(tick)) for tick in across],
        "upward": [(at_y(tick), short_number(tick)) for tick in upward],
        "lines": [
            (colour, " ".join(f"{at_x(x)},{at_y(y)}" for x, y in _thinned(line)))
            for colour, line in zip(colours, points, strict=True)
            if line
        ],
    }


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over neighbouring points, so that a long curve stays legible."""
    size = -(-len(points) // MOST_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
