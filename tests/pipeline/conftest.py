"""Runs a verb as the console script does, in this process."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cache.errors import ConfigError
from pipeline.cli import app
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.exit import StopRequest, exit_code_of, stop_request
from pipeline.printed_commands import forget

MINIMAL = "model: org/checkpoint\ndata: {splits: {train: train.jsonl, val: val.jsonl}}\noutput_dir: runs/first\n"


@dataclass(frozen=True)
class Result:
    """How a verb ended."""

    code: int
    out: str
    err: str

    def check_refusal(self, code: int, *parts: str) -> None:
        """The verb ended with one message on stderr that has all parts and says what to do."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        before, _, message = f"\n{self.err}".partition("\nerror: ")  # on a line of its own, not behind a bar
        assert "error" not in before
        assert "\nerror: " not in message
        assert message.count("\n  What to do: ") == 1
        assert [part for part in parts if part not in message] == []


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    """`run("cache", "--split", "train", ...)` -> exit code, stdout, stderr."""
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


def draw(file: Path, size: tuple[int, int]) -> None:
    """A picture of two colours."""
    image = Image.new("RGB", size, (200, 30, 60))
    image.paste((20, 120, 220), (0, 0, size[0] // 2, size[1]))
    image.save(file)


def record(image: str) -> dict[str, Any]:
    """A flat row."""
    return {"image": image, "question": "Which colours?", "answer": "Red and blue."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of three images that are fine: good0.png, good1.png, good2.png."""
    target = tmp_path / "data"
    target.mkdir()
    for number in range(3):
        draw(target / f"good{number}.png", (64 + 32 * number, 48))
    return target


@pytest.fixture
def config(folder: Path, write_config: Callable[..., Path]) -> Callable[..., Path]:
    """my.yaml over train.jsonl of the given rows, each a row or a line as it stands; one step of training."""

    def write(*rows: dict[str, Any] | str, **sections: Any) -> Path:
        lines = [item if isinstance(item, str) else json.dumps(item) for item in rows]
        (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        sections["train"] = {"max_steps": 1, "eval_split": None, **sections.get("train", {})}
        return write_config({"train": str(folder / "train.jsonl")}, **sections)

    return write


@pytest.fixture
def cached(run: Callable[..., Any], config: Callable[..., Path]) -> Path:
    """my.yaml whose train split is cached."""
    file = config(*(record(f"good{number}.png") for number in range(3)))
    assert run("cache", "--config", file, "--split", "train").code == 0
    return file


@pytest.fixture
def add_record(folder: Path) -> Callable[..., None]:
    """Appends a row to train.jsonl, and makes its image: of the given content, or a picture."""

    def add(name: str, content: bytes | None = None) -> None:
        if content is None:
            draw(folder / name, (50, 50))
        else:
            (folder / name).write_bytes(content)
        with (folder / "train.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record(name)) + "\n")

    return add


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PipelineConfig]:
    """Loads a text as my.yaml, with overrides."""

    def load_text(text: str, *overrides: str) -> PipelineConfig:
        file = tmp_path / "my.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, list(overrides))

    return load_text


@pytest.fixture
def refusal(load: Callable[..., PipelineConfig]) -> Callable[..., str]:
    """The message with which a text or an override is refused."""

    def message(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        assert "What to do: " in str(caught.value)
        return str(caught.value)

    return message
