"""Several processes on the CPU (gloo): the same steps, the same losses, the same adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

BIN = Path(sys.executable).parent


def _train(config: Path, output: Path, processes: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    command = [str(BIN / "pipeline"), "train", "--config", str(config), "--from-cache"]
    if processes > 1:
        command = [str(BIN / "torchrun"), "--standalone", f"--nproc_per_node={processes}", "--no-python", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--set", f"output_dir={output}"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "samples_per_second" in line]
    return losses, load_file(output / "adapter" / "adapter_model.safetensors")


def test_two_processes_learn_what_one_learns(write_config: Callable[..., Path], data_dir: Path, tmp_path: Path) -> None:
    # 37 rows in steps of 6: the last step of an epoch holds one row, less than there are processes.
    train = {"effective_batch_size": 6, "max_steps": 8, "learning_rate": 3e-3, "tokens_per_pack": 100}
    config = write_config(
        {"train": str(data_dir / "train.jsonl")}, train=train, cache={"dir": str(tmp_path / "features")}
    )
    cached = subprocess.run(
        [str(BIN / "pipeline"), "cache", "--config", str(config), "--split", "train"], capture_output=True, check=False
    )
    assert cached.returncode == 0
    alone, wanted = _train(config, tmp_path / "one", 1)
    losses, adapter = _train(config, tmp_path / "two", 2)
    assert len(losses) == 8
    assert losses == pytest.approx(alone, rel=1e-5)
    for name, tensor in wanted.items():
        assert (adapter[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name
