"""This project's rows of the training table: packs alone, and the whole `pipeline train --from-cache` loop."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache.errors import ResourceError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from tests.benchmarks.device_clock import clean, forget_peak, milliseconds, peak_gib
from tests.benchmarks.kept_rows import DOES_NOT_FIT, Row
from tests.benchmarks.kernel_profile import profiled
from tests.benchmarks.train_command import pipeline, train_anew
from train.config import TrainConfig
from train.features import features_on
from train.inputs import Inputs
from train.job import Job
from train.lora import add_lora
from train.loss import pack_loss
from train.model import autocast, load_language_model, prepare_for_training, training_device
from train.pack import Pack
from train.recompute import recomputing
from train.rows import with_rows_that_fit
from train.step_dataset import StepDataset
from train.throughput import ALLOC_RETRIES

HELD_IMAGES = 16  # 640 MiB of features on the device
WARM_UP, ROUNDS, LAST = 4, 8, 8
TRY = 1  # rounds of both where there is no GPU
MEMORY_OR_DISK = 5  # exit code


def packs_row(config_file: Path, name: str, *, profile: bool) -> Row:
    """Forward and backward of the packs of a few steps, again and again."""
    config = load_config(config_file)
    device = training_device(config.train)
    try:
        row = _measured(config, name, device, profile=profile)
    except (torch.OutOfMemoryError, ResourceError):  # the latter where no row of `auto` fits
        row = Row(name, "packs", None, DOES_NOT_FIT)
    clean(device)
    return row


def loop_row(config_file: Path, name: str, packs: Row | None) -> Row:
    """The whole loop from its first step, reading, optimizer and log lines included; median of the last steps.

    Args:
        packs: whose rows are taken, so that the two differ in nothing else and a calibration is made once.
    """
    if packs is None or packs.ms is None:
        return Row(name, "loop", None, DOES_NOT_FIT)  # nor do its packs
    config = load_config(config_file)
    device = training_device(config.train)
    rows = {
        "tokens_per_pack": packs.details["tokens_per_pack"],
        "gradient_checkpointing": packs.details["checkpointing"],
    }
    settings = [f"--set=train.{key}={value}" for key, value in rows.items()]
    try:
        lines = train_anew(
            lambda: pipeline("train", "--config", str(config_file), "--from-cache", *settings), config.output_dir
        )
    except SystemExit as error:
        clean(device)
        if error.code != MEMORY_OR_DISK:
            raise
        return Row(name, "loop", None, DOES_NOT_FIT)
    clean(device)
    last = lines[1:][-LAST:]  # the first step warms up
    details = {
        "data_wait": statistics.median(line["data_wait_share"] for line in last),
        "peak_gib": last[-1]["peak_memory_gib"],
        "alloc_retries": sum(line.get(ALLOC_RETRIES, 0) for line in last),
        "samples": config.train.effective_batch_size,
        **rows,
    }
    return Row(name, "loop", 1000 / statistics.median(line["samples_per_second"] for line in last), details=details)


@dataclass
class _Bench:
    """A model, ready for training, and its data."""

    config: TrainConfig
    device: torch.device
    model: Any
    steps: StepDataset


def _bench(config: PipelineConfig, device: torch.device) -> _Bench:
    c = config
    job = Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, True)
    inputs = Inputs.open(job)
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    model = add_lora(load_language_model(c.model, c.train, device), c.train.lora, seed=1)
    prepare_for_training(model, c.train, device)
    with tempfile.TemporaryDirectory() as fresh:  # no earlier calibration counts
        decided = with_rows_that_fit(
            c.train,
            model,
            lambda train: inputs.steps(samples, train, shuffle=True),
            Path(fresh),
            job.settings(),
            device=device,
            tower=None,
            world_size=1,
        )
    model.train()
    recomputing(model, decided.gradient_checkpointing)
    return _Bench(decided, device, model, inputs.steps(samples, decided, shuffle=True))


def _measured(config: PipelineConfig, name: str, device: torch.device, *, profile: bool) -> Row:
    bench = _bench(config, device)
    images = len(bench.steps[0, 0].images)
    numbers = range(min(len(bench.steps), max(1, HELD_IMAGES // images)))
    steps = [bench.steps[0, number] for number in numbers]
    held = [
        (features_on(device, step.images, None), [pack.map_tensors("to", device) for pack in step.packs])
        for step in steps
    ]

    def work(number: int) -> None:
        features, packs = held[number % len(held)]
        for pack in packs:
            with autocast(bench.config, device):
                loss = pack_loss(bench.model, pack, features)
            loss.backward()

    def run(number: int) -> float:
        taken = milliseconds(device, lambda: work(number))
        bench.model.zero_grad(set_to_none=True)
        return taken

    started = time.perf_counter()
    run(0)
    first = time.perf_counter() - started
    on_gpu = device.type == "cuda"
    for number in range(1, 1 + (WARM_UP if on_gpu else TRY)):
        run(number)
    forget_peak(device)
    times = [run(number) for number in range(ROUNDS if on_gpu else TRY)]
    details = _described(bench, [pack for _, packs in held for pack in packs], sum(s.num_samples for s in steps))
    details |= {"peak_gib": peak_gib(device), "first_step_s": first, "samples": steps[0].num_samples}
    if profile:
        details["profile"] = profiled(device, lambda: work(0)) | {"samples": steps[0].num_samples}
    return Row(name, "packs", statistics.median(times) / steps[0].num_samples, details=details)


def _described(bench: _Bench, packs: list[Pack], samples: int) -> dict[str, Any]:
    """What the rows of a step are like."""
    lengths = [pack.input_ids.shape[1] for pack in packs]
    return {
        "tokens_per_pack": bench.config.tokens_per_pack,
        "checkpointing": bench.config.gradient_checkpointing,
        "longest_pack": max(lengths),
        "tokens_per_sample": sum(lengths) / samples,
        "padding": _padding(packs),
    }


def _padding(packs: list[Pack]) -> float:
    """Share of positions that are there only to fill up a block."""
    alone = 0
    for pack in packs:
        own = torch.arange(pack.input_ids.shape[1], device=pack.input_ids.device) + 1
        alone += int(((pack.visible_until == own) & (pack.position_ids[1:, 0].sum(0) == 0)).sum())
    return alone / sum(pack.input_ids.shape[1] for pack in packs)
