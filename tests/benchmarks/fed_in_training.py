"""Share of its time that `pipeline train --from-cache` waits for features, from a disk, cold, plain and throttled.

    python -m tests.benchmarks.fed_in_training --disk /path/on/the/disk --model /where/the/8b/is/or/goes [--steps 32]

The 8B's true shapes with random weights, LoRA rank 32, 1036x1288 images of 40 MiB each (20 in 8 bits), on one GPU.
Each row is one run of the command line; before it the page cache is dropped (as root), and each image is read once in
it. The throttled disk is the kernel's doing: a control group (version 2) with `io.max`. Over HTTP a server on this
machine paces its sends. `read` is what the kernel counted as read from disks for the run, beside what its features
take. Compiling lets the workers run ahead, so the first steps are left out. Takes up to 6 GB a cache below --disk and
removes them; the model (17.5 GB) is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.fed_without_waiting import serve
from tests.benchmarks.true_shapes import make_8b_checkpoint, make_dataset

WARM_UP = 12  # steps: what four workers with two steps each may have fetched ahead, and the compiling ones
GROUP = "vision-once-benchmark"


@dataclass(frozen=True)
class Case:
    """What is trained on: questions an image, images a step, tokens a pack, cache settings."""

    questions: int
    images: int
    budget: int
    cache: dict[str, Any]


CASES = {
    "9 questions an image, safetensors": Case(9, 4, 10240, {"format": "safetensors"}),
    "9 questions an image, WebDataset": Case(9, 4, 10240, {"format": "webdataset"}),
    "9 questions an image, HDF5": Case(9, 4, 10240, {"format": "hdf5"}),
    "1 question an image, float8_e4m3": Case(1, 8, 12288, {"format": "safetensors", "storage_dtype": "float8_e4m3"}),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rate", type=float, default=400.0, help="MB/s of the throttled disk and of the server")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    model = make_8b_checkpoint(options.model)
    print("| features from | data wait | largest of a step | ms / sample | MB/s needed | read GB / features GB |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.cases:
        folder = Path(tempfile.mkdtemp(dir=options.disk))
        try:
            _rows(name, CASES[name], folder, model, options)
        finally:
            shutil.rmtree(folder)


def _rows(name: str, case: Case, folder: Path, model: Path, options: argparse.Namespace) -> None:
    rows = make_dataset(folder, images=case.images * options.steps, questions=case.questions)
    features = folder / "features"
    settings = {
        "model": str(model),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(folder / "run"),
        "cache": {"dir": str(features), "num_workers": 8, **case.cache},
        "train": {
            "max_steps": options.steps,
            "effective_batch_size": case.images * case.questions,
            "tokens_per_pack": case.budget,
            "lora": {"r": 32, "lora_alpha": 64},
            "dataloader_num_workers": 4,
            "logging_steps": 1,
            "save_steps": 10_000,
            "report_to": ["none"],
        },
    }
    _pipeline(folder, settings, "cache", "--split", "train")
    size = sum(file.stat().st_size for file in features.rglob("*") if file.is_file())
    print(_row(f"{name}, disk", folder, settings, size, case), flush=True)
    with _throttled(options.disk, options.rate) as refused:
        what = f"{name}, disk throttled to {options.rate:.0f} MB/s"
        print(
            f"| {what} | not run: {refused} | | | | |" if refused else _row(what, folder, settings, size, case),
            flush=True,
        )
    if case.cache["format"] == "webdataset":
        with _served(features, options.rate) as url:
            over = {**settings, "cache": {**settings["cache"], "dir": url}}
            print(_row(f"{name}, HTTP at {options.rate:.0f} MB/s", folder, over, size, case), flush=True)


def _row(what: str, folder: Path, settings: dict[str, Any], size: int, case: Case) -> str:
    shutil.rmtree(folder / "run", ignore_errors=True)
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock
    _pipeline(folder, settings, "train", "--from-cache")
    read = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock - before) * 512
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "data_wait_share" in line][WARM_UP:]
    seconds = sum(line["seconds"] for line in steps)
    waited = sum(line["seconds"] * line["data_wait_share"] for line in steps)
    samples = case.images * case.questions * len(steps)
    bytes_a_step = size / settings["train"]["max_steps"]
    return (
        f"| {what} | {waited / seconds:.2%} | {max(line['data_wait_share'] for line in steps):.2%} "
        f"| {1000 * seconds / samples:.1f} | {bytes_a_step * len(steps) / seconds / 1e6:.0f} "
        f"| {read / 1e9:.1f} / {size / 1e9:.1f} |"
    )


@contextlib.contextmanager
def _throttled(disk: Path, rate: float) -> Iterator[str | None]:
    """This process and its children read from that disk at so many MB/s; yields why not, if it cannot be."""
    roots = [Path(line.split()[1]) for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]
    root = next((root for root in roots if "io" in (root / "cgroup.controllers").read_text().split()), None)
    if root is None:
        yield "no control groups of version 2 with the io controller"
        return
    try:
        _limit(root, disk, rate)
    except OSError as error:
        yield f"{error.strerror}: {error.filename}"
        return
    try:
        yield None
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        (root / GROUP).rmdir()


def _limit(root: Path, disk: Path, rate: float) -> None:
    device = disk.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    whole = block.parent if (block / "partition").exists() else block
    (root / "cgroup.subtree_control").write_text("+io")
    (root / GROUP).mkdir(exist_ok=True)
    (root / GROUP / "io.max").write_text(f"{(whole / 'dev').read_text().strip()} rbps={rate * 1e6:.0f}")
    (root / GROUP / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def _served(features: Path, rate: float) -> Iterator[str]:
    address: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(features, rate * 1e6, address), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{address.get(timeout=30)}"
    finally:
        server.terminate()
        server.join()


def _pipeline(folder: Path, settings: dict[str, Any], *arguments: str) -> None:
    file = folder / "my.yaml"
    file.write_text(yaml.safe_dump(settings))
    verb, *rest = arguments
    command = [sys.executable, "-c", "from pipeline.cli import main; main()", verb, "--config", str(file), *rest]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    main()
