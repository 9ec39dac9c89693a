"""Rates that earlier runs have measured: images a second of the cache stage, samples a second of training."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from cache.estimate import Rates

ENOUGH_IMAGES = 256  # of fewer a run's rate is, for the most part, that of starting and loading
_MEASURED = ("encoded_images", "written_bytes", "seconds", "images_per_second", "waited")


def find_rates(output_dir: Path, *, images_per_second: float | None, samples_per_second: float | None) -> Rates:
    """What was given, or else measured by earlier runs in `output_dir`.

    Of several splits the one with the most encoded images counts; of training the median of the log lines.
    """
    sources: dict[str, str] = {}
    tokens_per_image = None
    if images_per_second is None:
        images_per_second, file, tokens_per_image = _cache_rate(output_dir)
        if images_per_second:
            of = f" on images of {tokens_per_image:.4g} tokens" if tokens_per_image else ""
            sources["images_per_second"] = f"{images_per_second:.4g}, measured{of} ({file})"
    else:
        sources["images_per_second"] = f"{images_per_second:.4g}, given"
    if samples_per_second is None:
        samples_per_second = _training_rate(output_dir / "metrics.jsonl")
        if samples_per_second:
            sources["samples_per_second"] = f"{samples_per_second:.4g}, measured (metrics.jsonl)"
    else:
        sources["samples_per_second"] = f"{samples_per_second:.4g}, given"
    return Rates(images_per_second, samples_per_second, sources, tokens_per_image)


def keep_better_rate(file: Path, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a caching run, with the rate that `file` has from an earlier run where that one tells more.

    The run's own counts if it encoded ENOUGH_IMAGES or no fewer than the earlier one; so an addition of a few images,
    or a run that had nothing to do, leaves what was measured before.
    """
    before = _object(file.read_text(encoding="utf-8")) if file.is_file() else {}
    count = before.get("encoded_images")
    if not isinstance(count, int) or figures["encoded_images"] >= min(count, ENOUGH_IMAGES):
        return figures
    return figures | {name: before[name] for name in _MEASURED if name in before}


def _cache_rate(folder: Path) -> tuple[float | None, str, float | None]:
    """Images/s, the file that says so, and the tokens of the split's mean image."""
    measured = []
    for file in sorted(folder.glob("cache-*.json")):
        figures = _object(file.read_text(encoding="utf-8"))
        rate, count = figures.get("images_per_second"), figures.get("encoded_images")
        # A part is measured on its own; the whole is written by the process that has started the parts.
        if isinstance(rate, int | float) and isinstance(count, int) and rate > 0 and ".part-" not in file.name:
            tokens, images = figures.get("image_tokens"), figures.get("distinct_images")
            mean = tokens / images if isinstance(tokens, int) and isinstance(images, int) and images else None
            measured.append((count, float(rate), file.name, mean))
    return max(measured, key=lambda one: one[:3])[1:] if measured else (None, "", None)


def _training_rate(file: Path) -> float | None:
    if not file.is_file():
        return None
    values = [_object(line).get("samples_per_second") for line in file.read_text(encoding="utf-8").splitlines()]
    rates = [float(value) for value in values if isinstance(value, int | float) and value > 0]
    return median(rates) if rates else None


def _object(text: str) -> dict[str, Any]:
    """A JSON object; empty for what is none, such as a line cut off by a kill."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
