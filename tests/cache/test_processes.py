"""Processes for parts of the work, as `--gpus` starts them, when the one that started them is stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.build import CacheBuilder
from cache.verify import verify_cache
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, committed_keys, draw_images, write_rows

COUNT = 300
# What `pipeline cache --gpus 2` does, with processes that see no GPU.
STARTS_TWO = """
import os, sys
from pathlib import Path
from cache.errors import StoppedError
from pipeline.cache_verbs import cache_in_processes
from pipeline.config_file import load_config
from pipeline.exit import exit_code_of, stop_request

def work():
    stop_request.install()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    config = Path(sys.argv[1])
    arguments = ["--config", str(config), "--split", "train"]
    print(cache_in_processes(load_config(config), arguments, "train", [environment] * 2, stop_request))

sys.exit(exit_code_of(work))
"""
CAUGHT_BY_CHILD = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: (print("asked to stop", flush=True), sys.exit(143)))
print(os.getpid(), flush=True)
time.sleep(200)
"""
STARTS_ONE = """
import os, sys
from pathlib import Path
from cache.processes import Child, run_children
command = (sys.executable, "-c", sys.argv[2])
run_children([Child("one", command, dict(os.environ), Path(sys.argv[1]))], lambda: False)
"""


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any] | None = None) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, "it has ended"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether it does anything: who takes over a killed parent's children may let the dead ones lie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    parent = subprocess.Popen([sys.executable, "-c", STARTS_ONE, log, CAUGHT_BY_CHILD])
    wait_for(lambda: log.exists() and "\n" in log.read_text(), parent)
    pid = int(log.read_text())
    parent.kill()
    parent.wait()
    try:
        wait_for(lambda: not runs(pid))
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
    assert "asked to stop" in log.read_text()


@pytest.fixture
def builder(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> CacheBuilder:
    """More images than are encoded before a signal comes, in small shards."""
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", COUNT))
    return builder_of(make_config({"train": str(rows)}, cache={"shard_size": 200_000}))


def start(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", STARTS_TWO, tmp_path / "my.yaml"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.soak),
        pytest.param(signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_two_processes_that_cache_end_with_their_parent(
    number: signal.Signals, builder: CacheBuilder, tmp_path: Path
) -> None:
    parent = start(tmp_path)
    wait_for(lambda: len(committed_keys(builder.folder)) > 0, parent)
    children = children_of(parent.pid)
    assert len(children) == 2
    parent.send_signal(number)
    _, err = parent.communicate(timeout=200)
    if number == signal.SIGKILL:
        wait_for(lambda: not any(map(runs, children)))
    else:
        assert parent.returncode == 128 + number, err
        assert "run the same command to go on" in err
        assert not any(map(runs, children))
    kept = committed_keys(builder.folder)
    assert 0 < len(kept) == len(set(kept)) < COUNT
    for log in (tmp_path / "run").glob("cache-train.part-*.log"):
        assert "Traceback" not in log.read_text()
    summary = builder.run("train", SILENT)
    assert summary.encoded_images == COUNT - len(kept), "all that was encoded is kept, and nothing twice"
    verify_cache(builder.folder, SILENT).require_sound()
