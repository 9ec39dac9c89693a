"""A running cluster, small cached data, and the verbs run in this process as the console script runs them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cli import app
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.demo.screenshots import make_screenshots
from pipeline.exit import StopRequest, exit_code_of, stop_request
from pipeline.printed_commands import forget
from tests.slurm.cluster import Cluster, missing_programs

BIN = Path(sys.executable).parent
CAN_INSTALL = os.geteuid() == 0 and shutil.which("apt-get") is not None


@dataclass(frozen=True)
class Result:
    """How a verb ended."""

    code: int
    out: str
    err: str


def require(missing: Sequence[str], *, ci: bool, can_install: bool) -> None:
    """Without SLURM: fail where it has to be or could be there, else skip, which tests/conftest.py makes loud."""
    if missing:
        message = (
            f"SLURM is not installed ({', '.join(missing)} missing): `make slurm` installs it from Debian's packages"
        )
        (pytest.fail if ci or can_install else pytest.skip)(message)


@pytest.fixture(scope="session")
def _running_cluster() -> Iterator[Cluster]:
    require(missing_programs(), ci=bool(os.environ.get("CI")), can_install=CAN_INSTALL)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's own folders have names too long for munge's socket
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(_running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster without jobs; SLURM's commands find it."""
    for name in set(os.environ) - set(_running_cluster.environment):
        monkeypatch.delenv(name)
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, _running_cluster.environment[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield _running_cluster
    left = _running_cluster.client("squeue", "-h", "-o", "%A").split()
    if left:
        _running_cluster.client("scancel", *left)
        _running_cluster.until(lambda: not _running_cluster.client("squeue", "-h", "-o", "%A"), "the jobs have ended")


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    """`verb("submit", "--config", ...)` -> exit code, stdout, stderr."""
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}

    def call(*args: object) -> Result:
        capsys.readouterr()
        code = exit_code_of(lambda: app([str(arg) for arg in args], standalone_mode=False, prog_name="pipeline"))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    yield call
    stop_request.received = None
    forget()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's drawings: 12 for training, 2 for evaluation."""
    folder = tmp_path_factory.mktemp("drawn")
    make_screenshots(folder, train_images=12, val_images=2)
    return folder


@pytest.fixture
def job_config(tmp_path: Path, tiny: Path, screenshots: Path) -> Callable[..., Path]:
    """Writes `folder`/my.yaml for jobs of one CPU: the drawings, two parts, a few steps; sections can be added."""

    def write(folder: Path = tmp_path, **sections: Any) -> Path:
        content: dict[str, Any] = {
            "model": str(tiny),
            "data": {"splits": {name: str(screenshots / f"{name}.jsonl") for name in ("train", "val")}},
            "output_dir": str(folder / "run"),
            "cache": {"dtype": "float32", "num_workers": 0},
            "train": {
                "precision": "fp32",
                "dataloader_num_workers": 0,
                "effective_batch_size": 8,
                "max_steps": 4,
                "learning_rate": 3e-3,
                "report_to": ["none"],
                "eval_split": None,
                "lora": {"r": 4},
            },
            "eval": {"max_new_tokens": 4, "limit": 4},
            "slurm": {"cpus_per_task": 1, "mem": "1G", "cache": {"num_parts": 2}, "train": {}},
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
        file = folder / "my.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return file

    return write


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory, tiny: Path, screenshots: Path) -> Path:
    """A cache of the drawings, for tests that begin with training."""
    from cache.build import CacheBuilder
    from cache.config import CacheConfig, DataConfig, ModelConfig
    from cache.progress import Silent

    folder = tmp_path_factory.mktemp("features")
    splits: Any = {name: str(screenshots / f"{name}.jsonl") for name in ("train", "val")}
    builder = CacheBuilder(
        ModelConfig(name_or_path=str(tiny)),
        DataConfig(splits=splits),
        CacheConfig(dtype="float32", num_workers=0),
        folder,
    )
    for split in splits:
        builder.run(split, Silent())
    return folder


def jobs_of(config: Path) -> dict[str, str]:
    """Name -> number of the jobs that the run folder lists; the last one of each name."""
    settings: PipelineConfig = load_config(config)
    listed = json.loads((settings.output_dir / "slurm" / "jobs.json").read_text())
    return {job["name"]: job["id"] for job in listed["jobs"]}


def steps_of(run: Path) -> list[int]:
    """The steps that metrics.jsonl has so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n") and '"loss"' in line]
