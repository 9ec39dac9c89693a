"""Commands that messages name are runnable as printed: they are taken from the message and run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli import app
from pipeline.printed_commands import VERBS, forget, note_options, note_splits, runnable

from .conftest import record


@pytest.fixture
def given(tmp_path: Path) -> Iterator[None]:
    """A process that was started with a configuration of two splits."""
    note_options(tmp_path / "my own.yaml", ["train.lora.r=4"])
    note_splits(["train", "val"])
    yield
    forget()


def _commands(message: str) -> list[list[str]]:
    return [shlex.split(command)[1:] for command in re.findall(r"`(pipeline [^`]*)`", message)]


def test_the_verbs_are_those_that_need_a_configuration() -> None:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    needing = {name for name, verb in commands.items() if any(p.name == "config" and p.required for p in verb.params)}
    assert needing == set(VERBS)


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("see `pipeline status`", ["status", "CONFIG"]),
        ("`pipeline cache --split val --part 1`.", ["cache", "CONFIG", "--split", "val", "--part", "1"]),
        ("run `pipeline cache` first", ["cache", "CONFIG", "--split", "train"]),
        ("`pipeline cache --repair --split NAME`: it", ["cache", "CONFIG", "--repair", "--split", "train"]),
        ("`pipeline train --config a.yaml`", ["train", "--config", "a.yaml"]),
        ("`pipeline demo`", ["demo"]),
    ],
)
def test_a_command_gets_the_options_that_name_the_configuration(tmp_path: Path, text: str, words: list[str]) -> None:
    options = ["--config", str(tmp_path / "my own.yaml"), "--set=train.lora.r=4"]
    wanted = [part for word in words for part in (options if word == "CONFIG" else [word])]

    told = runnable(text)

    assert _commands(told) == [wanted]
    assert runnable(told) == told
    assert ("(or --split val)" in told) == ("--split" not in text or "NAME" in text) * ("cache" in text)


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize("text", ["`squeue --me`", "`pipeline`", "pipeline cache", "`pipeline caches`"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert runnable(text) == text


def test_what_a_refusal_says_can_be_run_as_it_is_printed(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(record("good0.png"))
    (tmp_path / "a folder").mkdir()
    file = (tmp_path / "my.yaml").rename(tmp_path / "a folder" / "it's my.yaml")
    monkeypatch.chdir(tmp_path)
    given = ["--config", file.relative_to(tmp_path), "--set", f"output_dir={tmp_path}/other run"]

    refused = run("train", *given, "--from-cache")

    refused.check_refusal(4, "there is no cache here")
    (command,) = _commands(refused.err)
    assert run(*command).code == 0
    assert run("train", *given, "--from-cache").code == 0


def test_a_submission_without_slurm_names_a_status_that_can_be_run(
    run: Callable[..., Any], config: Callable[..., Path]
) -> None:
    file = config(record("good0.png"))

    (command,) = _commands(run("status", "--config", file).out)

    assert command == ["submit", "--config", str(file)]
    assert run(*command, "--dry-run").code == 0
