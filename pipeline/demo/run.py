"""The whole job on drawn screenshots, through the commands that a user would type."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from cache.errors import PipelineError
from pipeline.demo.screenshots import make_screenshots
from pipeline.demo.tiny_model import make_tiny_checkpoint
from pipeline.report import ReportSample, write_report

QUESTION = "What colour is the left button?"
REPORT_SAMPLES = 8


class DemoError(PipelineError):
    """A command of the demo failed; it has said why itself."""


def run_demo(folder: Path) -> None:
    """Make a checkpoint and a dataset in `folder` and run cache, train, eval and predict on them.

    Raises:
        DemoError: a command failed.
    """
    started = time.perf_counter()
    print(f"Making a tiny Qwen3-VL checkpoint and drawn screenshots in {folder}", flush=True)
    make_tiny_checkpoint(folder / "model")
    make_screenshots(folder / "data")
    config = folder / "demo.yaml"
    config.write_text(yaml.safe_dump(demo_config(folder), sort_keys=False), encoding="utf-8")
    image = folder / "data" / "images" / "val_0000.png"
    common = ["--config", str(config)]
    _pipeline("cache", *common, "--split", "train")
    _pipeline("cache", *common, "--split", "val")
    _pipeline("eval", *common, "--split", "val", "--base")
    _pipeline("train", *common, "--from-cache")
    _pipeline("eval", *common, "--split", "val")
    _pipeline("predict", *common, "--image", str(image), "--prompt", QUESTION)
    report, facts = _report(folder)
    print("\n" + "\n".join(f"{name:28s} {value}" for name, value in facts))
    print(f"{'the whole demo':28s} {time.perf_counter() - started:.0f} s")
    print(f"{'report':28s} {report}")


def demo_config(folder: Path) -> dict[str, Any]:
    """The demo's configuration. fp32 since a CPU has nothing faster."""
    return {
        "model": str(folder / "model"),
        "data": {"splits": {"train": str(folder / "data/train.jsonl"), "val": str(folder / "data/val.jsonl")}},
        "output_dir": str(folder / "run"),
        "cache": {"dtype": "float32"},
        "train": {
            "precision": "fp32",
            "lora": {"r": 16, "lora_alpha": 32},
            "learning_rate": 3.0e-3,
            "effective_batch_size": 32,
            "max_steps": 300,
            "logging_steps": 10,
            "eval_steps": 100,
            "save_steps": 100,
        },
        "eval": {"max_new_tokens": 12, "batch_size": 64},
    }


def _pipeline(*arguments: str) -> None:
    script = Path(sys.executable).with_name("pipeline")
    print(f"\n$ pipeline {shlex.join(arguments)}", flush=True)
    # So small a model gains nothing by more threads, and becomes many times slower where others use the same cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([str(script), *arguments], env=environment, check=False)  # noqa: S603
    if done.returncode:
        raise DemoError(f"`pipeline {arguments[0]}` ended with exit code {done.returncode}")


def _report(folder: Path) -> tuple[Path, list[tuple[str, str]]]:
    run = folder / "run"
    before, after = (_json(run / name / "metrics.json") for name in ("eval-val-base", "eval-val"))
    facts = [
        ("val exact match, before", f"{before['exact_match']:.1%}"),
        ("val exact match, after", f"{after['exact_match']:.1%}"),
        ("val loss, before and after", f"{before['loss']:.3f}, {after['loss']:.3f}"),
        *_saved(run),
    ]
    samples = [_sample(folder, json.loads(line)) for line in _some(run / "eval-val" / "predictions.jsonl")]
    report = write_report(run, folder / "report.html", title="Demo", samples=samples, facts=facts)
    return report, facts


def _saved(run: Path) -> list[tuple[str, str]]:
    """How often the tower would have run without the cache, at the rate that it was measured at."""
    cached = _json(run / "cache-train.json")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = max(int(line["step"]) for line in lines)
    samples = steps * demo_config(run)["train"]["effective_batch_size"]
    runs = cached["distinct_images"]
    facts = [("tower runs", f"{runs}, one an image; training looked at images {samples} times")]
    if cached["images_per_second"] > 0:
        seconds = (samples - runs) / cached["images_per_second"]
        facts.append(
            ("tower time saved", f"{seconds:.0f} s (computed from {cached['images_per_second']:.0f} images/s)")
        )
    return facts


def _some(predictions: Path) -> list[str]:
    lines = predictions.read_text(encoding="utf-8").splitlines()
    # One further each time: every image has the same questions in the same order, and a plain stride shows one of them.
    stride = max(1, len(lines) // REPORT_SAMPLES) + 1
    return [lines[index % len(lines)] for index in range(0, REPORT_SAMPLES * stride, stride)]


def _sample(folder: Path, prediction: dict[str, Any]) -> ReportSample:
    return ReportSample(
        image=(folder / "data" / prediction["images"][0]).read_bytes(),
        question=prediction["question"].replace("<image>", ""),
        answer=prediction["answer"],
        prediction=prediction["prediction"],
        correct=prediction["exact_match"],
    )


def _json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
