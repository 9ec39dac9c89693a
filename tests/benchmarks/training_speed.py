"""Time of training from the cache at the 8B's true shapes on one GPU; writes a Markdown table.

    python -m tests.benchmarks.training_speed --work /path/on/a/fast/disk --out table.md [--peers] [--profile]

Rows are forward and backward of packs made by the training code (LoRA rank 32 on all linear layers, bf16), and the
whole `pipeline train --from-cache` loop: reading, optimizer, logging. Figures are medians after warm-up. --peers runs
tests.benchmarks.peer_speed first, on the same machine; --profile says on which kernels the time of the packs went.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from cache.progress import Silent
from pipeline.cli import app
from pipeline.config import load_config
from pipeline.exit import exit_code_of
from tests.benchmarks.true_shapes import make_8b_checkpoint, make_dataset
from train.features import features_on
from train.inputs import Inputs
from train.job import Job
from train.lora import add_lora
from train.loss import pack_loss
from train.model import autocast, load_language_model, prepare_for_training

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One line of the table: questions an image, images a step, tokens a pack, settings, GiB the allocator may take."""

    questions: int
    images: int
    budget: int
    settings: dict[str, Any]
    gib: float | None = None


CASES = {
    "9 an image": Case(9, 4, 10240, {}),
    "1 an image": Case(1, 8, 12288, {}),
    "9 an image, FP8 base": Case(9, 4, 10240, {"quantization": "fp8"}),
    "1 an image, FP8 base": Case(1, 8, 12288, {"quantization": "fp8"}),
    "9 an image, NF4, 22 GiB": Case(9, 4, 2560, {"quantization": "nf4"}, 22),
}


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--liger-path", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--attention", default="auto", help="auto, flash, flex: train.attention")
    arguments = parser.parse_args()
    import transformers

    lines = _peers(arguments.liger_path) if arguments.peers else []
    lines += [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}",
        "",
        "| what | ms / sample | tokens / sample | padding | peak GiB | data wait | first step s |",
        "|---|---|---|---|---|---|---|",
    ]
    checkpoint = make_8b_checkpoint(arguments.work / "model-8b")
    for name in arguments.cases:
        case = CASES[name]
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.gib * 2**30 / total) if case.gib else 1.0)
        config = prepare(arguments.work, checkpoint, case, attention=arguments.attention)
        lines.append(bare(config, name, profile=arguments.profile))
        _clean()
        if not arguments.no_loop:
            lines.append(loop(config, name))
            _clean()
        arguments.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _peers(liger_path: str) -> list[str]:
    command = [sys.executable, "-m", "tests.benchmarks.peer_speed", "--liger-path", liger_path]
    return [*subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines(), ""]


def _clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


def prepare(work: Path, checkpoint: Path, case: Case, *, attention: str = "auto") -> Path:
    """Dataset, configuration and cache; cases with the same data share them."""
    work = work / f"{case.questions}-questions-{case.images}-images"
    work.mkdir(parents=True, exist_ok=True)
    rows = make_dataset(work, images=case.images * 4, questions=case.questions)
    config = {
        "model": str(checkpoint),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(work / f"run-{case.settings.get('quantization', 'bf16')}-{attention}"),
        "cache": {"dir": str(work / "features"), "num_workers": 8},
        "train": {
            "max_steps": 16,
            "order": "image",
            "attention": attention,
            "effective_batch_size": case.images * case.questions,
            "tokens_per_pack": case.budget,
            "lora": {"r": 32, "lora_alpha": 64},
            "dataloader_num_workers": 4,
            "save_steps": 1000,
            "report_to": ["none"],
            **case.settings,
        },
    }
    file = work / f"{attention}.yaml"
    file.write_text(yaml.safe_dump(config))
    _run("cache", "--config", str(file), "--split", "train")
    return file


def bare(config_file: Path, name: str, *, profile: bool) -> str:
    """Forward and backward of the packs of four steps, again and again."""
    c = load_config(config_file)
    inputs = Inputs.open(Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, True))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    dataset = inputs.steps(samples, c.train, shuffle=True)
    steps = [dataset[0, number] for number in range(4)]
    model = add_lora(load_language_model(c.model, c.train, DEVICE), c.train.lora, seed=1)
    prepare_for_training(model, c.train, DEVICE)
    model.train()
    held = [
        (features_on(DEVICE, step.images, None), [pack.map_tensors("to", DEVICE) for pack in step.packs])
        for step in steps
    ]

    def run(number: int) -> float:
        features, packs = held[number % len(held)]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for pack in packs:
            with autocast(c.train, DEVICE):
                loss = pack_loss(model, pack, features)
            loss.backward()
        end.record()
        torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return begin.elapsed_time(end)

    started = time.perf_counter()
    run(0)
    first = time.perf_counter() - started
    for number in range(1, 5):
        run(number)
    torch.cuda.reset_peak_memory_stats()
    times = [run(number) for number in range(8)]
    count = steps[0].num_samples
    tokens = sum(p.input_ids.shape[1] for _, packs in held for p in packs) / sum(s.num_samples for s in steps)
    padding = _padding([p for _, packs in held for p in packs])
    if profile:
        _print_profile(name, run)
    peak = torch.cuda.max_memory_allocated() / 2**30
    rate = statistics.median(times) / count
    return f"| {name}, packs | {rate:.1f} | {tokens:.0f} | {padding:.1%} | {peak:.1f} | | {first:.0f} |"


def loop(config_file: Path, name: str) -> str:
    """`pipeline train --from-cache`, median of the last steps."""
    torch.cuda.reset_peak_memory_stats()
    _run("train", "--config", str(config_file), "--from-cache")
    output = load_config(config_file).output_dir
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "samples_per_second" in line][-8:]
    rate = 1000 / statistics.median(line["samples_per_second"] for line in last)
    wait = statistics.median(line["data_wait_share"] for line in last)
    return f"| {name}, whole loop | {rate:.1f} | | | {last[-1]['peak_memory_gib']:.1f} | {wait:.1%} | |"


KERNELS = {
    "matrix products, FP8": ("e4m3", "qgmma", "f8f8"),
    "flex_attention": ("flex",),
    "FlashAttention": ("flash",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "copies": ("memcpy", "memset", "copy"),
    "compiled element-wise": ("triton",),
}


def _print_profile(name: str, run: Callable[[int], float]) -> None:
    """Device time of one step by the kind of kernel, and the ten longest kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(0)
    events = [e for e in profiler.key_averages() if e.device_time_total > 0]
    total = sum(e.device_time_total for e in events)
    shares: dict[str, float] = {}
    for event in events:
        kind = next((k for k, words in KERNELS.items() if any(w in event.key.lower() for w in words)), "other")
        shares[kind] = shares.get(kind, 0.0) + event.device_time_total / total
    print(f"{name}: {total / 1000:.0f} ms of kernels:", {k: f"{v:.1%}" for k, v in shares.items()})
    for event in sorted(events, key=lambda e: -e.device_time_total)[:10]:
        print(f"  {event.device_time_total / total:6.1%} {event.count:5d} {event.key[:100]}", flush=True)


def _padding(packs: list[Any]) -> float:
    """Share of positions that are there only to fill up a block."""
    total = sum(pack.input_ids.shape[1] for pack in packs)
    index = [torch.arange(pack.input_ids.shape[1], device=DEVICE) for pack in packs]
    alone = sum(
        int(((pack.visible_until == i + 1) & (pack.position_ids[1:, 0].sum(0) == 0)).sum())
        for pack, i in zip(packs, index, strict=True)
    )
    return alone / total


def _run(*arguments: str) -> None:
    code = exit_code_of(lambda: app(list(arguments), standalone_mode=False))
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
