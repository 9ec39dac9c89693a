"""The console script as its own process: a mistake without a traceback, and signals to it and to its whole group."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.chain_progress import parts_progress

CONSOLE_SCRIPT = Path(sys.executable).with_name("pipeline")


def _console(*args: object, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [CONSOLE_SCRIPT, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,
    )


def test_the_console_script_tells_a_mistake_without_a_traceback(config: Callable[..., Path]) -> None:
    process = _console("train", "--config", config(), "--set", "train.lora.rank=3")
    out, err = process.communicate(timeout=200)

    assert process.returncode == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 2


def _stop_when(
    process: subprocess.Popen[str],
    ready: Callable[[], bool],
    *,
    group: bool = False,
    number: signal.Signals = signal.SIGTERM,
) -> tuple[int, str]:
    """Send a signal once `ready`, to the process or, as a terminal and a scheduler do, to its whole group."""
    deadline = time.monotonic() + 200
    while not ready() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[1]
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=200)
    return process.returncode, err


def _many_images(folder: Path, data_dir: Path, count: int) -> Path:
    """A split of many distinct images that takes seconds to cache."""
    from PIL import Image

    folder.mkdir()
    source = Image.open(data_dir / "images" / "lounge.jpg").convert("RGB").resize((128, 96))
    rows = []
    for number in range(count):
        copy = source.copy()
        copy.putpixel((0, 0), (number % 256, number // 256, 7))
        copy.save(folder / f"{number}.bmp")
        rows.append({"image": f"{number}.bmp", "question": "What?", "answer": "Chairs."})
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("number", "group", "workers"),
    [(signal.SIGTERM, False, 0), (signal.SIGTERM, True, 1), (signal.SIGINT, True, 1), (signal.SIGUSR1, False, 1)],
)
def test_a_signal_while_caching_keeps_what_is_committed(
    run: Callable[..., Any],
    write_config: Callable[..., Path],
    data_dir: Path,
    tmp_path: Path,
    number: signal.Signals,
    group: bool,
    workers: int,
) -> None:
    split = _many_images(tmp_path / "many", data_dir, 300)
    # Small shards, so that some are committed early.
    config = write_config({"train": str(split)}, cache={"shard_size": 500_000, "num_workers": workers})
    features = tmp_path / "run" / "features"

    process = _console("cache", "--config", config, "--split", "train")
    code, err = _stop_when(
        process, lambda: len(list(features.glob("*/shards/*.json"))) >= 2, group=group, number=number
    )

    assert code == 128 + number, err
    assert f"{number.name}: stopping at the next safe point" in err
    assert "Traceback" not in err
    assert "run the same command to go on" in err
    kept = sum(len(json.loads(file.read_text())["entries"]) for file in features.glob("*/shards/*.json"))
    assert 0 < kept < 300
    # `pipeline status` counts by the list of images, which lies there from the start.
    (cache,) = (path.parent for path in features.glob("*/shards"))
    progress = parts_progress(cache, "train", 1)
    assert progress is not None
    assert progress.parts == ((kept, 300),)
    finished = run("cache", "--config", config, "--split", "train")
    assert finished.code == 0, finished.err
    assert f"encoded now      {300 - kept} images" in finished.out


@pytest.mark.parametrize(("group", "workers"), [(False, 0), (True, 1)])
def test_sigterm_while_training_leaves_a_checkpoint_to_go_on_from(
    run: Callable[..., Any], cached: Path, tmp_path: Path, group: bool, workers: int
) -> None:
    raw = yaml.safe_load(cached.read_text())
    raw["train"] |= {"max_steps": 2000, "save_steps": 1000, "dataloader_num_workers": workers}
    cached.write_text(yaml.safe_dump(raw))
    metrics = tmp_path / "run" / "metrics.jsonl"

    process = _console("train", "--config", cached, "--from-cache")
    code, err = _stop_when(process, lambda: metrics.exists() and metrics.stat().st_size > 0, group=group)

    assert code == 143, err
    assert "Traceback" not in err
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    step = int(checkpoint.name.rpartition("-")[2])
    raw["train"] |= {"max_steps": step + 1, "dataloader_num_workers": 0}
    cached.write_text(yaml.safe_dump(raw))
    resumed = run("train", "--config", cached, "--from-cache")
    assert resumed.code == 0, resumed.err
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, step + 2))


WRITES = """
import sys
from pipeline.exit import exit_code_of, stop_request

def work():
    stop_request.install()
    sys.stderr.write("#" * 1_000_000 + "\\n")
    assert stop_request()

sys.exit(exit_code_of(work) or stop_request.exit_code)
"""


def test_a_signal_that_interrupts_a_message_is_a_request_like_any_other() -> None:
    """As where a terminal or a pipe takes no more for a moment: the handler's message must not enter that one."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen([sys.executable, "-c", WRITES], stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    deadline, waiting = time.monotonic() + 200, b""
    full = fcntl.fcntl(process.stderr, fcntl.F_GETPIPE_SZ)
    while int.from_bytes(waiting, sys.byteorder) < full:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
        waiting = fcntl.ioctl(process.stderr, termios.FIONREAD, bytes(4))
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=200)[1].decode()
    assert process.returncode == 143, err.strip("#")
    assert "Traceback" not in err
    assert err.count("#") == 1_000_000
    assert "SIGTERM: stopping at the next safe point\n" in err


LEAVES = """
import atexit, threading
from pipeline.exit import leave

atexit.register(print, "at exit")
threading.Thread(target=threading.Event().wait).start()  # ends never, as a thread of a library may
print("said")
leave(7)
"""


def test_one_of_several_processes_ends_whatever_threads_it_has() -> None:
    environment = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (7, "said\nat exit\n"), done.stderr
