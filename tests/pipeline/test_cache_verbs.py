"""plan, verify, prune and the options of cache, as a user runs them: output, exit codes, what to do next."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.exit import StopRequest

from .conftest import record


def features(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "run" / "features").iterdir()
    return folder


def test_plan_before_and_after_a_measurement(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    file = config(*(record(f"good{number}.png") for number in (0, 1, 2, 0)))
    before = run("plan", "--config", file)
    assert before.code == 0, before.err
    assert "train: 4 records, 3 distinct images in 4 uses" in before.out
    assert "no rate is known yet" in before.out
    given = ["--images-per-second", 2, "--samples-per-second", 8, "--json"]
    assert json.loads(run("plan", "--config", file, *given).out)["splits"]["train"]["hours_to_cache"] == pytest.approx(
        3 / 2 / 3600
    )
    assert not (tmp_path / "run").exists(), "a plan writes nothing"
    assert run("cache", "--config", file, "--split", "train").code == 0
    figures = json.loads(run("plan", "--config", file, "--split", "train", "--json").out)
    assert figures["images_per_second"] > 0
    assert figures["splits"]["train"]["epochs_until_it_pays_at_best"] == pytest.approx(
        (2 + 3 + 4) / (2 + 3 + 4 + 2)  # their tokens, one image twice
    )
    done = run("plan", "--config", file, *given)
    assert json.loads(done.out)["splits"]["train"]["hours_to_cache"] == 0
    assert json.loads(done.out)["needed_bytes"] == 0
    run("plan", "--config", file, "--split", "nope").check_refusal(2, "unknown split 'nope'")


def test_verify_says_what_to_run_and_that_mends_it(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    sound = run("verify", "--config", cached)
    assert sound.code == 0, sound.err
    assert "sound: 1 shards, 3 entries" in sound.out
    (shard,) = (features(tmp_path) / "shards").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    for options in ([], ["--split", "train"]):
        run("verify", "--config", cached, *options).check_refusal(
            4,
            f"shards/{shard.name}: its bytes do not match",
            f"`pipeline cache --config {cached} --repair --split train`",
        )
    mended = run("cache", "--config", cached, "--repair", "--split", "train")
    assert mended.code == 0, mended.err
    assert "kept             2 intact images" in mended.out
    assert "encoded now      1 images" in mended.out
    assert (features(tmp_path) / "damaged").is_dir()
    assert run("verify", "--config", cached).code == 0
    assert "2 damaged files that were moved aside" in run("prune", "--config", cached, "--dry-run").out
    assert run("prune", "--config", cached, "--leftovers", "--yes", "--dry-run").code == 0
    assert list((features(tmp_path) / "damaged").iterdir())
    assert run("prune", "--config", cached, "--leftovers", "--yes").code == 0
    assert not list((features(tmp_path) / "damaged").iterdir())


def test_a_damaged_list_and_manifest_are_mended(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "splits/train.json"):
        file = features(tmp_path) / name
        file.write_bytes(file.read_bytes()[:-30])
        run("verify", "--config", cached).check_refusal(4, name, "--repair")
        assert run("cache", "--config", cached, "--split", "train").code == 4
        mended = run("cache", "--config", cached, "--repair", "--split", "train")
        assert "encoded now      0 images" in mended.out, mended.err
        assert run("verify", "--config", cached).code == 0


def test_parts_by_hand(run: Callable[..., Any], config: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    file = config(*(record(f"good{number}.png") for number in range(3)))
    run("cache", "--config", file, "--split", "train", "--num-parts", 2, "--part", 2).check_refusal(2, "no part 2 of 2")
    parts = [["--num-parts", "2", "--part", str(part)] for part in (0, 1)]
    first = run("cache", "--config", file, "--split", "train", *parts[0])
    assert first.code == 0, first.err
    run("train", "--config", file, "--from-cache").check_refusal(4, "not complete", "--num-parts 2 --part 1`")
    run("verify", "--config", file).check_refusal(4, "0 damaged files", "--num-parts 2 --part 1`")
    assert run("cache", "--config", file, "--split", "train", *parts[1]).code == 0
    assert run("verify", "--config", file).code == 0
    assert run("train", "--config", file, "--from-cache").code == 0
    assert (tmp_path / "run" / "cache-train.part-1-of-2.json").is_file()


def test_prune_deletes_only_with_yes(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    name = features(tmp_path).name
    shown = run("prune", "--config", cached, "--fingerprint", name)
    assert "nothing was deleted" in shown.out
    run("prune", "--config", cached, "--fingerprint", "nope", "--yes").check_refusal(2, "no fingerprint 'nope'", name)
    assert run("prune", "--config", cached, "--fingerprint", name, "--yes").code == 0
    assert not list((tmp_path / "run" / "features").iterdir())
    run("verify", "--config", cached).check_refusal(4, "there is no cache here")


@pytest.mark.parametrize(
    ("shard_format", "dtype", "suffix"),
    [("webdataset", "int8", "tar"), ("hdf5", "float8_e4m3", "h5"), ("hdf5", None, "h5")],
)
def test_a_repacked_cache_is_trained_from(
    run: Callable[..., Any], cached: Path, tmp_path: Path, shard_format: str, dtype: str | None, suffix: str
) -> None:
    source, copy = features(tmp_path), tmp_path / "copy"
    options = ["--format", shard_format, "--shard-size", 1, *(["--dtype", dtype] if dtype else [])]
    done = run("repack", "--config", cached, *options, "--output", copy)
    assert done.code == 0, done.err
    (folder,) = copy.iterdir()
    assert f"cache {folder}" in done.out
    shards = Counter(file.suffix for file in (folder / "shards").iterdir())
    assert shards == {f".{suffix}": 3, ".json": 3}, "of one byte or more each: an entry a shard"
    shutil.rmtree(source.parent)
    settings = [f"cache.dir={copy}", f"cache.format={shard_format}", f"output_dir={tmp_path / 'other'}"]
    settings += [f"cache.storage_dtype={dtype}"] if dtype else []
    chosen = [word for setting in settings for word in ("--set", setting)]
    verified = run("verify", "--config", cached, *chosen)
    assert verified.code == 0, verified.err
    assert "sound: 3 shards, 3 entries" in verified.out
    trained = run("train", "--config", cached, "--from-cache", *chosen, "--set", "train.max_steps=2")
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (tmp_path / "other" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert (tmp_path / "other" / "adapter" / "adapter_model.safetensors").is_file()
    if dtype:
        run("repack", "--config", cached, *chosen, "--dtype", "same").check_refusal(2, "what was lost does not come")


def test_a_signal_that_is_handed_on_as_well_is_one_request() -> None:
    request = StopRequest()
    handlers = {number: signal.getsignal(number) for number in StopRequest.SIGNALS}
    request.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request()
        request.ECHO_SECONDS = 0.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        other = StopRequest().install()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert other()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
