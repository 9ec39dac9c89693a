"""`pipeline train --from-cache` on one and on several GPUs of a machine; writes a Markdown table.

    python -m tests.benchmarks.several_gpus --work /path/on/a/fast/disk --out table.md --gpus 1 2 4
    python -m tests.benchmarks.several_gpus --work /path/on/a/fast/disk --out table.md --model 32b --fsdp 2

Qwen3-VL's shapes with random weights, 9 questions an image, 144 samples over 16 images (32b: 36 over 4) in every step,
whatever the number of GPUs: the whole loop, started by torchrun as a user does, median of the last steps. --fsdp makes
runs with train.fsdp: full_shard on so many GPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from tests.benchmarks.train_command import train_anew
from tests.benchmarks.training_cases import Case, prepare
from tests.benchmarks.true_shapes import SIZES, make_checkpoint

CASES = {"8b": Case(9, 16, 10240, {"logging_steps": 1}), "32b": Case(9, 4, 5120, {"logging_steps": 1})}
ENTRY = "from pipeline.cli import main; main()"


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--fsdp", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", choices=list(SIZES), default="8b")
    arguments = parser.parse_args()
    checkpoint = make_checkpoint(arguments.work / f"model-{arguments.model}", arguments.model)
    case = CASES[arguments.model]
    config = prepare(arguments.work / arguments.model, checkpoint, case)
    torch.cuda.empty_cache()
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "",
        "| model, GPUs | samples/s | of linear | data wait | peak GiB | losses of the first steps |",
        "|---|---|---|---|---|---|",
    ]
    alone = None
    runs = [(count, "none") for count in arguments.gpus] + [(count, "full_shard") for count in arguments.fsdp]
    for count, fsdp in runs:
        steps = metrics(config, arguments.work / f"run-{arguments.model}-{count}-{fsdp}", count, fsdp, arguments.steps)
        rate, wait = (
            statistics.median(s[k] for s in steps[arguments.steps // 2 :])
            for k in ("samples_per_second", "data_wait_share")
        )
        alone = alone or rate / count
        losses = " ".join(f"{step['loss']:.4f}" for step in steps[:6])
        name = f"{arguments.model}, {count}{'' if fsdp == 'none' else ', FSDP'}"
        peak = steps[-1]["peak_memory_gib"]
        lines.append(f"| {name} | {rate:.1f} | {rate / count / alone:.3f} | {wait:.1%} | {peak:.1f} | {losses} |")
        print(lines[-1], flush=True)
    arguments.out.write_text("\n".join(lines) + "\n")


def metrics(config: Path, output: Path, count: int, fsdp: str, steps: int) -> list[dict[str, float]]:
    """The logged steps of one run."""
    settings = {
        "output_dir": output,
        "train.max_steps": steps,
        "train.fsdp": fsdp,
    }
    command = [sys.executable, "-c", ENTRY] if count == 1 else _torchrun(count)
    command += ["train", "--config", str(config), "--from-cache", *(f"--set={k}={v}" for k, v in settings.items())]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if count == 1 else {})

    def train() -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")

    return train_anew(train, output)


def _torchrun(count: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [*launcher, "--no-python", sys.executable, "-c", ENTRY]


if __name__ == "__main__":
    main()
