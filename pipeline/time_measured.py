"""Finds what was measured: records of earlier jobs, logs of trainings, the calibration; and picks what applies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cache.progress import Progress
from pipeline.config import PipelineConfig
from pipeline.time_job import Measured
from pipeline.time_records import TIMES, JobClock, Phase, TimeRecord, phase_of
from pipeline.time_span import Span
from train.run_folder import METRICS_FILE, last_checkpoint

CALIBRATION = "time_calibration.json"
SPREAD_OF_ONE = 0.1  # of what was measured only once

_TRAIN = (
    "precision",
    "quantization",
    "tokens_per_pack",
    "gradient_checkpointing",
    "attention",
    "torch_compile",
    "share_prefixes",
    "fsdp",
    "tf32",
    "dataloader_num_workers",
)
_CACHE = (
    "dtype",
    "storage_dtype",
    "min_pixels",
    "max_pixels",
    "image_processor_device",
    "tower",
    "attn_implementation",
    "patches_per_batch",
    "num_workers",
)


def setting_of(job: str, settings: PipelineConfig) -> dict[str, Any]:
    """What decides how fast a job is, besides the device and the number of processes."""
    found: dict[str, Any] = {"model": settings.model.name_or_path}
    if job == "cache":
        found |= {f"cache.{name}": getattr(settings.cache, name) for name in _CACHE}
    if job == "train":
        found |= {f"train.{name}": getattr(settings.train, name) for name in _TRAIN}
        found |= {"train.lora.r": settings.train.lora.r, "cache.max_pixels": settings.cache.max_pixels}
    if job == "eval":
        found |= {f"train.{name}": getattr(settings.train, name) for name in ("precision", "quantization")}
        found |= {f"eval.{name}": getattr(settings.eval, name) for name in ("batch_size", "max_new_tokens")}
    return found


def new_record(job: str, settings: PipelineConfig, *, processes: int = 1) -> TimeRecord:
    """A record of a job that is about to run here; the rest is filled in at its end."""
    import torch

    asked = settings.cache.device if job == "cache" else settings.train.device
    on_gpu = asked != "cpu" and torch.cuda.is_available() and job in {"cache", "train", "eval"}
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    return TimeRecord(job, device, processes, setting_of(job, settings), 0.0, {}, 0.0)


def training_clock(progress: Progress, settings: PipelineConfig) -> JobClock:
    """The clock of a training run that is about to begin, or to go on from its last checkpoint."""
    folder, train = settings.output_dir, settings.train
    checkpoint = last_checkpoint(folder) if train.resume else None
    from_step = int(checkpoint.name.rpartition("-")[2]) if checkpoint is not None else 0
    record = new_record("train", settings, processes=int(os.environ.get("WORLD_SIZE", "1")))
    batch = train.effective_batch_size
    more = partial(training_phases, folder, from_step=from_step, batch=batch)
    return JobClock(progress, folder, "train", record, needs="tokens", more=more)


def training_phases(folder: Path, *, from_step: int, batch: int) -> dict[str, Phase]:
    """`tokens`, `evaluating` and `saving`, from the lines of metrics.jsonl behind a step.

    Args:
        from_step: where the run, or its latest start, began.
        batch: samples in a step.
    """
    lines = [line for line in _lines(folder / METRICS_FILE) if _number(line, "step") > from_step]
    timed = [line for line in lines if _number(line, "tokens_per_second") > 0]
    phases = {}
    tokens = phase_of([(line["seconds"], line["seconds"] * line["tokens_per_second"]) for line in timed])
    if tokens is not None:
        # Steps between a line and an evaluation are in no line.
        counted = sum(line["seconds"] * line["samples_per_second"] for line in timed) / batch
        all_steps = max(_number(line, "step") for line in timed) - from_step
        phases["tokens"] = replace(tokens, units=tokens.units * max(1.0, all_steps / counted))
    rates = [line for line in lines if _number(line, "eval_samples_per_second") > 0]
    marks = [(line["eval_runtime"], line["eval_runtime"] * line["eval_samples_per_second"]) for line in rates]
    others = {"evaluating": marks, "saving": [(line["save_runtime"], 1) for line in lines if "save_runtime" in line]}
    return phases | {name: found for name, timed in others.items() if (found := phase_of(timed)) is not None}


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and where it is from.

    Attributes:
        constant: whether its whole time is known, not only its rates.
    """

    record: TimeRecord
    source: str
    constant: bool = True


def find_records(settings: PipelineConfig, stages: Sequence[PipelineConfig]) -> list[Found]:
    """Everything that was measured in a run folder and in those of its stages, the newest first."""
    found = []
    for folder in dict.fromkeys([settings.output_dir, *(stage.output_dir for stage in stages)]):
        for file in sorted((folder / TIMES).glob("*.json")):
            record = TimeRecord.parse(_json(file))
            if record is not None:
                found.append(Found(record, str(file.relative_to(settings.output_dir))))
    for stage in stages:
        log = _killed_run(stage)
        if log is not None:
            found.append(Found(log, str((stage.output_dir / METRICS_FILE).relative_to(settings.output_dir)), False))
    content = _json(settings.output_dir / CALIBRATION)
    for item in content if isinstance(content, list) else []:
        record = TimeRecord.parse(item)
        if record is not None:
            found.append(Found(record, CALIBRATION))
    return sorted(found, key=lambda one: -one.record.written)


def choose(found: Iterable[Found], job: str, setting: Mapping[str, Any], processes: int = 1) -> Measured | None:
    """What runs with these settings, on the device of the newest of them, have measured; else the newest run; or None.

    Args:
        found: the newest first.
    """
    of_job = [one for one in found if one.record.job == job]
    alike = [one for one in of_job if dict(one.record.setting) == dict(setting)] or of_job
    best = next((one for one in alike if one.record.processes == processes), alike[0] if alike else None)
    if best is None:
        return None
    here = best.record
    pool = [best, *(one for one in alike if one is not best and _same_run(one.record, here))]
    names = dict.fromkeys(name for one in pool for name in one.record.phases)
    rates = {name: _rate([one.record.phases[name] for one in pool if name in one.record.phases]) for name in names}
    constants = [one.record.constant for one in pool if one.constant]
    whole = bool(constants)
    if not whole:  # a run that was killed: the start of another kind of run of this job will do
        constants = [one.record.constant for one in of_job if one.constant][:1]
    return Measured(
        _range(constants), rates, here.processes, here.device, _source(best, job, setting, constants, whole)
    )


def _same_run(record: TimeRecord, other: TimeRecord) -> bool:
    return (dict(record.setting), record.device, record.processes) == (
        dict(other.setting),
        other.device,
        other.processes,
    )


def _source(best: Found, job: str, setting: Mapping[str, Any], constants: Sequence[float], whole: bool) -> str:
    record = best.record
    text = f"{job}: {best.source}, {datetime.fromtimestamp(record.written):%d %b %H:%M}, on {record.device}"
    text += f", {record.processes} processes" if record.processes > 1 else ""
    other = [f"{name} {record.setting.get(name)}" for name in setting if record.setting.get(name) != setting[name]]
    text += f"; measured with other settings: {', '.join(other)}" if other else ""
    if not whole:
        text += "; the time of its start was not measured" if not constants else "; its start as another run's"
    return text


def _rate(phases: Sequence[Phase]) -> Span:
    """Over some runs: the mean by what each did; the bounds of those that did enough to have any."""
    likely = sum(p.units * p.seconds for p in phases) / sum(p.units for p in phases)
    most = max(p.units for p in phases)
    telling = [p for p in phases if p.units >= 0.1 * most]
    low, high = min(p.low for p in telling), max(p.high for p in telling)
    span = Span(min(low, likely), likely, max(high, likely))
    return span.wider(SPREAD_OF_ONE) if low == high else span


def _range(constants: Sequence[float]) -> Span:
    if not constants:
        return Span(0.0, 0.0, 0.0)
    span = Span(min(constants), median(constants), max(constants))
    return span.wider(SPREAD_OF_ONE) if len(constants) == 1 else span


def _killed_run(stage: PipelineConfig) -> TimeRecord | None:
    """The log of a training that did not live to write its record; None where the record is newer."""
    log, record = stage.output_dir / METRICS_FILE, stage.output_dir / TIMES / "train.json"
    if not log.exists() or (record.exists() and record.stat().st_mtime >= log.stat().st_mtime):
        return None
    phases = training_phases(stage.output_dir, from_step=0, batch=stage.train.effective_batch_size)
    if "tokens" not in phases:
        return None
    before = TimeRecord.parse(_json(record))
    device, processes = (before.device, before.processes) if before is not None else ("an unknown device", 1)
    return TimeRecord("train", device, processes, setting_of("train", stage), 0.0, phases, log.stat().st_mtime)


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if isinstance(content, dict):
            found.append(content)
    return found


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, int | float) else -1.0


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # what is not there or damaged has measured nothing
