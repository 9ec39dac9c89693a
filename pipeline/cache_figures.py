"""What a caching run leaves in the run folder, and says: its figures, and where the records left out are listed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cache.atomic import write_text
from cache.parts import WHOLE, Part
from cache.rates import keep_better_rate
from cache.summary import Summary
from cache.waits import IMAGES
from pipeline.config import PipelineConfig

_OF_A_RUN = ("recovered_images", "encoded_images", "written_bytes", "seconds", "waited")
MUCH = 0.3  # of the time; starting takes some of it in every run
NOW = "now"  # what the latest run did; the figures beside it may be those of an earlier one, which tell more


def summary_file(settings: PipelineConfig, split: str, part: Part) -> Path:
    """Where the figures of a caching run are kept."""
    return settings.output_dir / f"cache-{split}{f'.{part.name}' if part.of_several else ''}.json"


def report(settings: PipelineConfig, summary: Summary, part: Part) -> str:
    """Keep the figures of a caching run; returns them for a person."""
    figures = summary.figures()
    _keep(summary_file(settings, summary.split, part), figures)
    return _describe(settings, figures)


def report_together(settings: PipelineConfig, split: str, parts: Sequence[Part]) -> str:
    """The same of parts that ran at once, from what each has kept."""
    of_parts = [json.loads(summary_file(settings, split, part).read_text(encoding="utf-8")) for part in parts]
    figures: dict[str, Any] = {name: value for name, value in of_parts[0].items() if name != NOW}
    for name in ("recovered_images", "encoded_images", "written_bytes"):
        figures[name] = sum(one[NOW][name] for one in of_parts)
    waits = [one[NOW]["waited"] for one in of_parts]
    figures["waited"] = {what: round(mean(one[what] for one in waits), 3) for what in waits[0]}
    figures["seconds"] = max(one[NOW]["seconds"] for one in of_parts)
    # The part that ended last knows what the others have left out.
    figures["num_rejected"] = max(one["num_rejected"] for one in of_parts)
    rate = figures["encoded_images"] / figures["seconds"] if figures["seconds"] else 0.0
    figures["images_per_second"] = round(rate, 3)
    _keep(summary_file(settings, split, WHOLE), figures)
    return _describe(settings, figures)


def _keep(target: Path, figures: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    now = {name: figures[name] for name in _OF_A_RUN}
    write_text(target, json.dumps(keep_better_rate(target, figures) | {NOW: now}, indent=1))


def _describe(settings: PipelineConfig, figures: dict[str, Any]) -> str:
    count = figures["num_rejected"]
    recovered = figures["recovered_images"]
    taken_up = [f"  taken up         {recovered} images of an interrupted run"] if recovered else []
    listed = f", listed in {settings.output_dir / figures['split']}.rejected.jsonl" if count else ""
    nothing = "" if figures["encoded_images"] or recovered else ": nothing was left to encode"
    return "\n".join(
        [
            f"split {figures['split']}: {figures['num_records']} records, {figures['distinct_images']} distinct images",
            *taken_up,
            f"  encoded now      {figures['encoded_images']} images, {figures['images_per_second']:.2f} images/s"
            f"{nothing}",
            *_waited(figures, settings.cache.num_workers),
            f"  written now      {figures['written_bytes'] / 1e6:.2f} MB",
            f"  cache            {figures['cache']}",
            f"  image tokens     {figures['image_tokens']}",
            f"  left out         {count} records{listed}",
        ]
    )


def _waited(figures: dict[str, Any], num_workers: int) -> list[str]:
    """What stood in the way, where anything was encoded. The stages overlap, so these are no parts of a whole."""
    if not figures["encoded_images"] or not figures["seconds"]:
        return []
    shares = {what: seconds / figures["seconds"] for what, seconds in figures["waited"].items()}
    told = ", ".join(f"{what} {share:.0%}" for what, share in shares.items())
    decoding = shares[IMAGES] > MUCH and shares[IMAGES] == max(shares.values())
    advice = f"; more cache.num_workers than {num_workers} may help" if decoding else ""
    return [f"  waited for       {told} of the time{advice}"]
