"""`pipeline plan --calibrate`: runs the verbs of a chain on a few samples of the data, and keeps what they took.

The same programs run in the same order as later in the jobs; only less data, a few steps, and a folder of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cache.atomic import write_text
from cache.config import DataConfig
from cache.dataset import read_split
from cache.errors import DataError, StoppedError
from cache.processes import Child, run_children
from cache.progress import Progress
from cache.records import Image, Record
from pipeline.chain import eval_split_of
from pipeline.config import PipelineConfig
from pipeline.experiments import Stage, experiments_of
from pipeline.options import PROGRAM
from pipeline.time_measured import CALIBRATION, setting_of
from pipeline.time_records import TIMES, TimeRecord
from train.calibrate import CALIBRATION_FILE

# No experiment can bear this name: theirs begin with a letter or digit. It is removed with all that is in it.
FOLDER = ".time-calibration"
STEPS = 12
MOST_IMAGES = 64
EVAL_BATCHES = 4


def calibrate(settings: PipelineConfig, steps: int, progress: Progress, should_stop: Callable[[], bool]) -> Path:
    """Run everything once in a scratch folder below output_dir, which is removed at the end; returns the figures' file.

    Args:
        steps: of training; the first of them only warms up.

    Raises:
        PipelineError: a verb failed; says how.
        StoppedError: `should_stop` said so; nothing of it is kept.
    """
    scratch = settings.output_dir / FOLDER
    shutil.rmtree(scratch, ignore_errors=True)  # of a calibration that failed
    stages = [stage for experiment in experiments_of(settings) for stage in experiment.stages]
    distinct = list({json.dumps(setting_of("train", s.settings), default=str): s for s in reversed(stages)}.values())
    held_out = eval_split_of(settings)
    runs: list[_Run] = []
    for number, stage in enumerate(reversed(distinct)):
        runs += _runs_of(stage, held_out, scratch / str(number), steps, first=not number)
    records = []
    progress.start("calibrating", len(runs), "run")
    try:
        for run in runs:
            records += run.measure(should_stop)
            progress.advance()
    except (StoppedError, KeyboardInterrupt):
        shutil.rmtree(scratch)
        raise StoppedError(
            "stopped; nothing of this calibration is kept", do="run the same command again: it begins anew"
        ) from None
    progress.finish()
    target = settings.output_dir / CALIBRATION
    write_text(target, json.dumps([asdict(record) for record in records], indent=1))
    shutil.rmtree(scratch)
    return target


@dataclass(frozen=True, slots=True)
class _Run:
    """One verb.

    Attributes:
        verb: with its options.
        record: name of the file of its record.
        original: the settings that the figures are for.
        folder: of the scratch run.
    """

    verb: tuple[str, ...]
    record: str | None
    original: PipelineConfig
    folder: Path

    def measure(self, should_stop: Callable[[], bool]) -> list[TimeRecord]:
        """Run it; its record with the time from outside, which the end of the interpreter is part of."""
        config = self.folder / f"{self.record or 'trials'}.yaml"
        name = " ".join(self.verb)
        command = (*PROGRAM, self.verb[0], "--config", str(config), *self.verb[1:])
        started = time.monotonic()
        run_children([Child(name, command, dict(os.environ), self.folder / f"{config.stem}.log")], should_stop)
        seconds = time.monotonic() - started
        if self.record is None:
            return []
        file = self.folder / "run" / TIMES / f"{self.record}.json"
        record = TimeRecord.parse(json.loads(file.read_text(encoding="utf-8")))
        if record is None:
            raise DataError("is no record", where=str(file), do="report this as a bug")
        setting = setting_of(record.job, self.original)
        return [
            replace(record, seconds=seconds, setting=setting, trials=self._trials() if record.job == "train" else ())
        ]

    def _trials(self) -> Sequence[dict[str, Any]]:
        found = [file for name in ("run", "trials") if (file := self.folder / name / CALIBRATION_FILE).exists()]
        return json.loads(found[0].read_text(encoding="utf-8"))["trials"] if found else ()


def _runs_of(stage: Stage, held_out: str | None, folder: Path, steps: int, *, first: bool) -> list[_Run]:
    """The verbs of a stage, in order; the cache is made in any case, the check and the evaluation once."""
    settings = stage.settings
    train = settings.train
    inner = train.eval_split if train.eval_split in settings.data.splits else None
    samples = {train.split: steps * train.effective_batch_size}
    for name in (inner, held_out):
        if name is not None:
            samples.setdefault(name, EVAL_BATCHES * settings.eval.batch_size)
    splits = {name: write_subset(settings.data, name, count, folder / "data") for name, count in samples.items()}
    content = _scratch(settings, folder, splits, inner, steps)
    runs = [_Run(("cache", "--split", name), f"cache-{name}", settings, folder) for name in splits]
    if first:
        runs.append(
            _Run(("check", *(word for name in splits for word in ("--split", name))), "check", settings, folder)
        )
    if _tries_rows(settings):
        trials = {**content["train"], "tokens_per_pack": "auto", "gradient_checkpointing": None, "max_steps": 1}
        tried = {**content, "train": trials, "output_dir": str(folder / "trials")}
        _write_config(folder / "trials.yaml", tried)
        runs.append(_Run(("train", "--from-cache"), None, settings, folder))
    runs.append(_Run(("train", "--from-cache"), "train", settings, folder))
    if first and held_out is not None:
        runs.append(_Run(("eval", "--split", held_out), f"eval-{held_out}", settings, folder))
    for run in runs:
        if run.record is not None:
            _write_config(folder / f"{run.record}.yaml", content)
    return runs


def _tries_rows(settings: PipelineConfig) -> bool:
    """Whether row lengths are to be tried beside the one that is set; `auto` tries them anyway."""
    import torch

    train = settings.train
    here = train.device != "cpu" and torch.cuda.is_available()
    return here and train.tokens_per_pack != "auto" and train.fsdp == "none"


def _scratch(
    settings: PipelineConfig, folder: Path, splits: dict[str, str], inner: str | None, steps: int
) -> dict[str, Any]:
    content = settings.model_dump(mode="json", exclude_unset=True, exclude={"experiments", "slurm"})
    content["output_dir"] = str(folder / "run")
    root = str(folder / "data" / "images")
    content["data"] = {
        **content["data"],
        "splits": {name: {"path": path, "image_root": root} for name, path in splits.items()},
        "format": "messages",
    }
    content["cache"] = {**content.get("cache", {}), "dir": str(folder / "features"), "stage_to": None}
    content["train"] = {
        **content.get("train", {}),
        "adapter": None,
        "eval_split": inner,
        "max_steps": steps,
        "logging_steps": 1,
        "eval_steps": steps,
        "save_steps": max(1, steps // 2),
        "load_best_model_at_end": False,
        "report_to": ["none"],
    }
    content["eval"] = {**content.get("eval", {}), "limit": None}
    return content


def _write_config(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def write_subset(data: DataConfig, split: str, count: int, folder: Path) -> str:
    """At least `count` samples, all questions of some images from all over the split; at most so many images."""
    groups: dict[str, list[Record]] = {}
    for record in read_split(data, split).records:
        groups.setdefault(record.images[0].path if record.images else record.record_id, []).append(record)
    chosen: list[Record] = []
    names = list(groups)
    wanted = min(MOST_IMAGES, len(names), -(-count * len(names) // max(1, sum(map(len, groups.values())))))
    for place in range(wanted):
        chosen += groups[names[place * len(names) // wanted]]
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}
    lines = [json.dumps(_row(record, split, images, written), ensure_ascii=False) for record in chosen]
    file = folder / f"{split}.jsonl"
    write_text(file, "".join(f"{line}\n" for line in lines))
    return str(file)


def _row(record: Record, split: str, folder: Path, written: dict[str, str]) -> dict[str, Any]:
    """A record as a row of messages; its images are copied into the folder."""
    for ref in record.images:
        if ref.path not in written:
            written[ref.path] = f"{split}-{len(written)}"
            (folder / written[ref.path]).write_bytes(ref.read())
    messages = [
        {
            "role": turn.role,
            "content": [
                {"type": "image", "image": written[record.images[part.index].path]}
                if isinstance(part, Image)
                else {"type": "text", "text": part.text}
                for part in turn.content
            ],
        }
        for turn in record.turns
    ]
    return {"messages": messages}
