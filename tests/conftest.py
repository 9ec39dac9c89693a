"""Fixtures: tiny checkpoints in the real layout, and a configuration file as a user would write it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import yaml
from hypothesis import HealthCheck, settings

from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.demo.tiny_model import make_tiny_checkpoint

from .range_server import Site, start_server

DATA = Path(__file__).parent / "data"

# The same examples in every run, and no limit on how long one may take: what else the machine does must not decide.
settings.register_profile(
    "seeded", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("seeded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on a cluster first: they wait more than they compute, and last they would keep one worker alone."""
    items.sort(key=lambda item: "slurm" not in item.path.parts)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests on a real cluster that were not run are not to be overlooked."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "SLURM is not installed" in str(r.longrepr)]
    if skipped:
        terminalreporter.section("WARNING: not run on a cluster", sep="!", red=True, bold=True)
        terminalreporter.line(f"{len(skipped)} tests need a real SLURM and were NOT RUN: it is not installed here.")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Records and images in the formats that users have."""
    return DATA


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint with untied embeddings."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with tied embeddings."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("moe"), family="moe", tie_word_embeddings=True)


@pytest.fixture
def write_config(tmp_path: Path, tiny: Path) -> Callable[..., Path]:
    """Writes my.yaml: the given splits, small images, fp32, no worker processes; sections can be added."""

    def write(splits: dict[str, Any], **sections: Any) -> Path:
        content: dict[str, Any] = {
            "model": str(tiny),
            "data": {"splits": splits},
            "output_dir": str(tmp_path / "run"),
            "cache": {"max_pixels": 128 * 128, "dtype": "float32", "num_workers": 0},
            "train": {
                "precision": "fp32",
                "dataloader_num_workers": 0,
                "effective_batch_size": 4,
                "report_to": ["none"],
                "lora": {"r": 4},
            },
            "eval": {"max_new_tokens": 6},
        }
        for name, section in sections.items():
            content[name] = {**content.get(name, {}), **section} if isinstance(section, dict) else section
        file = tmp_path / "my.yaml"
        file.write_text(yaml.safe_dump(content))
        return file

    return write


@pytest.fixture
def make_config(write_config: Callable[..., Path]) -> Callable[..., PipelineConfig]:
    """As write_config, but loaded."""

    def make(splits: dict[str, Any], **sections: Any) -> PipelineConfig:
        return load_config(write_config(splits, **sections))

    return make


@pytest.fixture
def serve() -> Iterator[Callable[..., Site]]:
    """Starts servers of folders, by HTTPS where a certificate is given."""
    servers = []

    def start(folder: Path, certificate: Path | None = None) -> Site:
        site, server = start_server(folder, certificate)
        servers.append(server)
        return site

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
