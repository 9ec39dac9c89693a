"""One self-contained HTML file about a training run: facts, curves and predictions."""

from __future__ import annotations

import base64
import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup, escape

from cache.errors import ConfigError, DataError

LONGEST_SIDE = 480  # pixels of a sample's image in the report
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 44  # margins of a chart, for the labels
TICKS = 5

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class ReportSample:
    """One prediction to show. `image` is an encoded image file (PNG, JPEG, ...), or None for a text-only sample."""

    image: bytes | None
    question: str
    answer: str
    prediction: str
    correct: bool


@dataclass(frozen=True)
class Series:
    """A line of a chart. `kind` chooses its colour."""

    name: str
    points: Points
    kind: Literal["first", "second"] = "first"


def write_report(
    run_dir: Path, out: Path, *, title: str, samples: list[ReportSample], facts: list[tuple[str, str]]
) -> Path:
    """Write `out`, one HTML file without references to anything outside, and return it.

    Args:
        run_dir: a training run's folder; its `metrics.jsonl` gives the curves. Lines with `loss` are training steps,
            lines with `eval_loss` evaluations.
        out: where to write; replaced in one go, so that a reader never sees half of it.
        title: the heading.
        samples: predictions to show, images scaled down to at most 480 pixels.
        facts: rows of the table at the top, name and value.

    Raises:
        ConfigError: `run_dir` has no metrics.jsonl.
        DataError: a line of metrics.jsonl is not a JSON object, or a sample's image cannot be decoded.
    """
    import jinja2

    metrics = _read_metrics(run_dir / "metrics.jsonl")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("report.html.jinja").render(
        title=title,
        facts=facts,
        charts=_charts(metrics),
        samples=[_card(sample, number) for number, sample in enumerate(samples, start=1)],
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(page, encoding="utf-8")
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            "no metrics.jsonl in this folder", where=str(path.parent), do="name the folder that a training run wrote"
        ) from None
    metrics = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # a run that is still going may be in the middle of its last line
                break
            raise DataError(f"not JSON: {error.msg}", where=f"{path}:{number}", do="remove this line") from None
        if not isinstance(entry, dict):
            raise DataError("not a JSON object", where=f"{path}:{number}", do="remove this line")
        metrics.append(entry)
    return metrics


def _charts(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plans = (
        ("Loss", [("train", "loss", "first"), ("eval", "eval_loss", "second")]),
        ("Samples per second", [("samples per second", "samples_per_second", "first")]),
        ("Image tokens per second", [("image tokens per second", "image_tokens_per_second", "first")]),
        ("Share of time waiting for data", [("data wait", "data_wait_share", "first")]),
        ("Learning rate", [("learning rate", "learning_rate", "first")]),
        ("Gradient norm", [("gradient norm", "grad_norm", "first")]),
    )
    charts: list[dict[str, Any]] = []
    for title, lines in plans:
        every = [Series(name, _points(metrics, key), kind) for name, key, kind in lines]  # type: ignore[arg-type]
        series = [one for one in every if one.points]
        if series:
            charts.append({"title": title, "series": series, "svg": draw_chart(title, series)})
    return charts


def _points(metrics: list[dict[str, Any]], key: str) -> Points:
    numbers = [(entry.get("step"), entry.get(key)) for entry in metrics]
    return [
        (float(step), float(value))
        for step, value in numbers
        if isinstance(step, int | float) and isinstance(value, int | float) and math.isfinite(value)
    ]


def draw_chart(title: str, series: list[Series]) -> Markup:
    """Draw lines over the step as an inline SVG, one marker-free polyline a series and axes from round numbers.

    Args:
        title: named in the drawing's label for screen readers.
        series: at least one, each with at least one finite point (step, value).
    """
    steps = [step for one in series for step, _ in one.points]
    values = [value for one in series for _, value in one.points]
    across = round_ticks(min(steps), max(steps))
    upward = round_ticks(min(0.0, *values), max(values))

    def x(step: float) -> float:
        return LEFT + (step - across[0]) / (across[-1] - across[0]) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - upward[0]) / (upward[-1] - upward[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{} over steps">').format(WIDTH, HEIGHT, title)]
    for tick in upward:
        parts.append(_line("grid", LEFT, y(tick), WIDTH - RIGHT, y(tick)))
        parts.append(_label(LEFT - 8, y(tick) + 4, "end", short_number(tick)))
    for tick in across:
        parts.append(_line("axis", x(tick), HEIGHT - BOTTOM, x(tick), HEIGHT - BOTTOM + 5))
        parts.append(_label(x(tick), HEIGHT - BOTTOM + 19, "middle", short_number(tick)))
    parts.append(_line("axis", LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM))
    parts.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", "step"))
    for one in series:
        places = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in one.points]
        joined = " ".join(",".join(place) for place in places)
        parts.append(Markup('<polyline class="{}" points="{}"/>').format(one.kind, joined))
        if len(places) <= TICKS:  # few points are seen better as dots; a single one is seen only so
            dots = (Markup('<circle class="{}" cx="{}" cy="{}" r="3"/>').format(one.kind, *place) for place in places)
            parts.extend(dots)
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    ends = [f"{number:.1f}" for number in (x1, y1, x2, y2)]
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, *ends)


def _label(x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", anchor, escape(text))


def round_ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten that enclose `low` and `high`."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * TICKS >= span * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def short_number(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.10g}" if abs(value) >= 1 else f"{value:.3g}"


def _card(sample: ReportSample, number: int) -> dict[str, Any]:
    source = None if sample.image is None else _data_uri(sample.image, number)
    return {
        "source": source,
        "question": sample.question,
        "answer": sample.answer,
        "prediction": sample.prediction,
        "correct": sample.correct,
    }


def _data_uri(image: bytes, number: int) -> str:
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(image)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image cannot be decoded: {error}", where=f"report sample {number}", do="replace the image"
        ) from None
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    # Photographs are several times smaller as JPEG; drawings with sharp edges stay exact as PNG.
    forms = []
    for form, mime in (("PNG", "image/png"), ("JPEG", "image/jpeg")):
        buffer = io.BytesIO()
        picture.save(buffer, form)
        forms.append((len(buffer.getvalue()), mime, buffer.getvalue()))
    _, mime, data = min(forms, key=lambda entry: entry[0])
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"
