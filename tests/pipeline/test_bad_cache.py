"""Caches that do not fit or are damaged: one clear message that shows what differs, exit code 4, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROW = {"image": "good0.png", "question": "Which colours?", "answer": "Red and blue."}


def test_a_split_that_is_not_cached_yet(run: Callable[..., Any], cached: Path, folder: Path) -> None:
    (folder / "val.jsonl").write_text(json.dumps(ROW) + "\n")
    val = f"data.splits.val={folder / 'val.jsonl'}"

    trained = run("train", "--config", cached, "--from-cache", "--set", val, "--set", "train.eval_split=val")
    evaluated = run("eval", "--config", cached, "--base", "--set", val)

    for result in (trained, evaluated):
        result.check_refusal(4, "split 'val' has not been cached yet", f"`pipeline cache --config {cached} --set=", val)
        assert " --split val`" in result.err


def test_training_before_anything_is_cached(run: Callable[..., Any], config: Callable[..., Path]) -> None:
    file = config(ROW)

    result = run("train", "--config", file, "--from-cache")

    result.check_refusal(4, "there is no cache here", f"`pipeline cache --config {file} --split train`")


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("cache.dtype=bfloat16", "dtype: 'float32' in the cache, 'bfloat16' asked for"),
        ("cache.max_pixels=65536", "processor.max_pixels: 16384 in the cache, 65536 asked for"),
        ("cache.attn_implementation=eager", "attn_implementation: 'sdpa' in the cache, 'eager' asked for"),
    ],
)
def test_a_cache_made_by_another_setting(run: Callable[..., Any], cached: Path, override: str, difference: str) -> None:
    result = run("train", "--config", cached, "--from-cache", "--set", override)

    result.check_refusal(4, "no cache here was made by this model and these settings", difference)


def test_a_cache_made_by_another_model(run: Callable[..., Any], cached: Path, tiny_moe: Path) -> None:
    result = run("train", "--config", cached, "--from-cache", "--set", f"model={tiny_moe}")

    result.check_refusal(4, "no cache here was made by this model", "vision_weights: ")


def test_a_cache_of_another_format_version(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    (manifest,) = (tmp_path / "run" / "features").glob("*/manifest.json")
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"format_version": 99}))

    for verb in (["train", "--from-cache"], ["cache", "--split", "train"]):
        result = run(verb[0], "--config", cached, *verb[1:])
        result.check_refusal(4, "manifest.json: has format version 99; this program reads version 1")


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_shard_during_training(run: Callable[..., Any], cached: Path, tmp_path: Path, damage: str) -> None:
    (shard,) = (tmp_path / "run" / "features").glob("*/shards/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 0xFF
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(content if damage == "bit" else content[: len(content) // 2])

    for workers in (0, 1):
        settings = ["--set", f"train.dataloader_num_workers={workers}"]
        run("train", "--config", cached, "--from-cache", *settings).check_refusal(4, shard.name, "pipeline cache")

    # The advice works.
    shard.unlink(missing_ok=True)
    shard.with_suffix(".json").unlink()
    again = run("cache", "--config", cached, "--split", "train")
    assert "encoded now      3 images" in again.out
    assert run("train", "--config", cached, "--from-cache").code == 0


def test_a_damaged_index(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    (index,) = (tmp_path / "run" / "features").glob("*/shards/*.json")
    index.write_text(index.read_text()[:50])

    run("train", "--config", cached, "--from-cache").check_refusal(4, index.name, "is damaged")


def test_a_dataset_that_has_grown_since_it_was_cached(
    run: Callable[..., Any], cached: Path, add_record: Callable[..., None]
) -> None:
    add_record("new.png")

    run("train", "--config", cached, "--from-cache").check_refusal(3, "train.jsonl:4: ", "new.png is not in the cache")
    again = run("cache", "--config", cached, "--split", "train")
    assert "encoded now      1 images" in again.out
    assert run("train", "--config", cached, "--from-cache").code == 0


def test_a_bad_image_costs_nothing_that_was_encoded_before_it(
    run: Callable[..., Any], cached: Path, folder: Path, data_dir: Path, add_record: Callable[..., None]
) -> None:
    intact = (data_dir / "images" / "lounge.jpg").read_bytes()
    add_record("new.png")
    add_record("cut.jpg", intact[: len(intact) // 2])

    run("cache", "--config", cached, "--split", "train").check_refusal(3, "train.jsonl:5: ", "cut.jpg")
    (folder / "cut.jpg").write_bytes(intact)
    mended = run("cache", "--config", cached, "--split", "train")

    assert mended.code == 0, mended.err
    assert "encoded now      1 images" in mended.out
