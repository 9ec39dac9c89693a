"""Several processes on one machine: the images are looked at once, before they start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.split_files import load_split
from pipeline import cache_verbs

from .conftest import record


def test_one_process_lists_the_images_for_all(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(*(record(f"good{number}.png") for number in range(3)))
    listed = []

    def start(*_: Any) -> str:
        (folder,) = (tmp_path / "run" / "features").iterdir()
        listed.append(load_split(folder, "train"))
        return ""

    monkeypatch.setattr(cache_verbs, "gpu_environments", lambda *_, **__: [{}, {}])  # there is no GPU here
    monkeypatch.setattr(cache_verbs, "cache_in_processes", start)
    done = run("cache", "--config", file, "--split", "train", "--gpus", "2")

    assert done.code == 0, done.err
    (images,) = listed
    assert (len(images.images), images.num_parts) == (3, 2)


def test_a_bad_record_is_told_before_any_process_is_started(
    run: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_verbs, "gpu_environments", lambda *_, **__: [{}, {}])
    monkeypatch.setattr(cache_verbs, "cache_in_processes", None)
    file = config(record("good0.png"), record("missing.png"))
    refused = run("cache", "--config", file, "--split", "train", "--gpus", "2")
    refused.check_refusal(3, "train.jsonl:2", "missing.png")
