"""What the training benchmarks train on: data, configuration and cache of each row of the table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.train_command import pipeline
from tests.benchmarks.true_shapes import make_dataset

MORE_IMAGES = 4  # times as many in a step where rows are not the case's own, so that there is something to cut


@dataclass(frozen=True)
class Case:
    """Questions an image, images a step, tokens a row, settings, GiB the allocator may take."""

    questions: int
    images: int
    tokens_per_pack: int | str
    settings: dict[str, Any]
    gib: float | None = None

    def with_rows(self, rows: str) -> Case:
        """`case`: a step of few images in one row, cut as it stands. A number, or `auto`, which takes what a
        calibration on the device finds: a larger step, cut into rows of so many tokens."""
        if rows == "case":
            return self
        tokens = rows if rows == "auto" else int(rows)
        return replace(self, images=self.images * MORE_IMAGES, tokens_per_pack=tokens)


CASES = {
    "9 an image": Case(9, 4, 10240, {}),
    "1 an image": Case(1, 8, 12288, {}),
    "9 an image, FP8 base": Case(9, 4, 10240, {"quantization": "fp8"}),
    "1 an image, FP8 base": Case(1, 8, 12288, {"quantization": "fp8"}),
    "9 an image, NF4, 22 GiB": Case(9, 4, 10240, {"quantization": "nf4", "gradient_checkpointing": True}, 22),
}


def rows_label(rows: str) -> str:
    """How a row of the table names it, behind the case's name."""
    return {"case": "", "auto": ", rows auto"}.get(rows, f", rows of {rows}")


def valid_rows(text: str) -> str:
    """An argument of --rows.

    Raises:
        ValueError: it is none.
    """
    if text not in ("case", "auto") and int(text) <= 0:
        raise ValueError(text)
    return text


def prepare(work: Path, checkpoint: Path, case: Case, *, attention: str = "auto", tiny: bool = False) -> Path:
    """Dataset, configuration and cache; cases with the same data share data and cache."""
    if tiny:
        case = replace(case, questions=min(case.questions, 3), images=max(1, case.images // 8))
    work = work / f"{case.questions}-questions-{case.images}-images"
    work.mkdir(parents=True, exist_ok=True)
    name = f"{case.settings.get('quantization', 'bf16')}-{attention}-{case.tokens_per_pack}"
    size = {"height": 96, "width": 128, "prompt_words": 3, "answer_words": 5} if tiny else {}
    images = case.images if tiny else 4 * case.images  # steps of an epoch, at whose start the first one is waited for
    rows = make_dataset(work, images=images, questions=case.questions, **size)
    on = {"device": "cpu"} if tiny else {}
    slow_there = {"precision": "fp32"} if tiny and case.settings.get("quantization") != "fp8" else {}
    config = {
        "model": str(checkpoint),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(work / f"run-{name}"),
        "cache": {"dir": str(work / "features"), "num_workers": 0 if tiny else 8, **on},
        "train": {
            "max_steps": 3 if tiny else 16,
            "order": "image",
            "attention": attention,
            "effective_batch_size": case.images * case.questions,
            "tokens_per_pack": case.tokens_per_pack,
            "lora": {"r": 32, "lora_alpha": 64},
            "dataloader_num_workers": 0 if tiny else 4,
            "save_steps": 1000,
            "report_to": ["none"],
            **on,
            **slow_there,
            **case.settings,
        },
    }
    file = work / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    pipeline("cache", "--config", str(file), "--split", "train")
    return file
