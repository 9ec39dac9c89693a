"""Parts that know nothing of each other, in any order, twice, at once or missing: right, or named as missing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.build import CacheBuilder
from cache.errors import CacheError, ConfigError, DataError, PipelineError, ResourceError, StoppedError
from cache.parts import Part, commands_for, part_of
from cache.processes import Child, run_children
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.verify import verify_cache
from pipeline.cache_verbs import cache_in_processes, gpu_environments
from pipeline.config import PipelineConfig

from .conftest import SILENT, assert_same_entries, builder_of, committed_keys, draw_images, write_rows

COUNT = 3


def elsewhere(config: PipelineConfig, folder: Path) -> PipelineConfig:
    return config.model_copy(update={"cache": config.cache.model_copy(update={"dir": folder})})


@pytest.fixture
def whole(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> tuple[CacheBuilder, PipelineConfig]:
    """Nine images, at least one in each of three parts, cached by one run."""
    images = draw_images(tmp_path / "images", 9)
    rows = write_rows(tmp_path / "train.jsonl", [*images, images[0]])
    config = make_config({"train": str(rows)}, cache={"shard_size": 40_000})
    builder = builder_of(config)
    builder.run("train", SILENT)
    assert {part_of(key, COUNT) for key in committed_keys(builder.folder)} == set(range(COUNT))
    return builder, config


def run_part(config: PipelineConfig, index: int, count: int = COUNT) -> None:
    builder_of(config).run("train", SILENT, part=Part(index, count))


def at_once(*work: Callable[[], None]) -> None:
    """Each in a process of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        children = [multiprocessing.get_context("fork").Process(target=one) for one in work]
        for child in children:
            child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * len(children)


def test_each_image_belongs_to_one_part_whatever_else_is_there() -> None:
    dice = random.Random(0)
    keys = [dice.randbytes(32).hex() for _ in range(3000)]
    for count in (1, 2, 7):
        parts = [Part(index, count) for index in range(count)]
        assert all(sum(part.has(key) for part in parts) == 1 for key in keys)
        sizes = [sum(part.has(key) for key in keys) for part in parts]
        assert min(sizes) > 0.8 * len(keys) / count
    for index, count in ((3, 3), (-1, 3), (0, 0)):
        with pytest.raises(ConfigError, match=f"no part {index} of {count}"):
            Part(index, count)
    assert commands_for("val", keys[:1], 1) == "`pipeline cache --split val`"
    number = part_of(keys[0], 7)
    assert commands_for("val", keys[:1], 7) == f"`pipeline cache --split val --num-parts 7 --part {number}`"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2, 2)])
def test_the_parts_together_are_the_whole(
    whole: Any, tmp_path: Path, order: tuple[int, ...], tower_calls: dict[str, int]
) -> None:
    config = elsewhere(whole[1], tmp_path / "parts")
    for number, index in enumerate(order):
        folder = builder_of(config).folder
        missing = set(range(COUNT)) - set(order[:number])
        if number and missing:
            with pytest.raises(CacheError, match="is not complete") as caught:
                FeatureCache(folder).split("train")
            for part in range(COUNT):
                assert (f"--num-parts 3 --part {part}`" in str(caught.value.do)) is (part in missing)
            with pytest.raises(CacheError, match="incomplete splits") as verified:
                verify_cache(folder, SILENT).require_sound()
            assert all(f"--num-parts 3 --part {part}`" in str(verified.value.do) for part in missing)
        run_part(config, index)
    assert tower_calls["encode"] == 9, "a part does its own images, once"
    assert_same_entries(folder, whole[0].folder)
    verify_cache(folder, SILENT).require_sound()
    assert [i.path for i in FeatureCache(folder).split("train").images] == [
        i.path for i in FeatureCache(whole[0].folder).split("train").images
    ]
    builder_of(config).run("train", SILENT)
    assert tower_calls["encode"] == 9


def test_all_parts_at_once_and_each_twice(whole: Any, tmp_path: Path) -> None:
    config = elsewhere(whole[1], tmp_path / "parts")
    at_once(*[lambda index=index: run_part(config, index) for index in (0, 1, 2, 0, 1, 2)])
    folder = builder_of(config).folder
    cache = FeatureCache(folder)
    assert cache.keys() == sorted(set(committed_keys(folder))), "an entry in two shards is one entry"
    assert len(cache) == 9
    assert len(cache.split("train").images) == 9
    assert_same_entries(folder, whole[0].folder)
    verify_cache(folder, SILENT).require_sound()


def test_a_later_part_reads_no_image_that_is_listed(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = elsewhere(whole[1], tmp_path / "parts")
    run_part(config, 0)
    opened: list[str] = []
    read = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: opened.append(self.path) or read(self))
    builder = builder_of(config)
    builder.run("train", SILENT, part=Part(1, COUNT))
    mine = {i.path for i in FeatureCache(whole[0].folder).split("train").images if Part(1, COUNT).has(i.key)}
    assert set(opened) == mine


@pytest.mark.parametrize("together", [False, True])
def test_images_that_cannot_be_decoded_are_known_to_all_parts(
    tmp_path: Path, make_config: Callable[..., PipelineConfig], together: bool
) -> None:
    images = draw_images(tmp_path / "images", 24)
    for file in images[::4]:
        file.write_bytes(file.read_bytes()[:-200])  # the header is whole
    rows = write_rows(tmp_path / "train.jsonl", images)
    config = make_config({"train": str(rows)}, data={"on_bad_record": "report", "max_bad_share": 0.5})
    builder_of(config).run("train", SILENT)
    expected = FeatureCache(builder_of(config).folder).split("train")
    assert len(expected.refused) == 6
    config = elsewhere(config, tmp_path / "parts")
    work = [lambda index=index: run_part(config, index, 4) for index in (3, 1, 0, 2)]
    if together:
        at_once(*work)
    else:
        for one in work:
            one()
    found = FeatureCache(builder_of(config).folder).split("train")
    assert found.images == expected.images
    assert found.refused == expected.refused
    assert found.num_parts == 4


def test_space_for_all_parts_is_asked_for(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(elsewhere(whole[1], tmp_path / "parts"))
    plans = [builder.plan("train", SILENT, Part(index, COUNT)) for index in range(COUNT)]
    needed = sum(plan.todo_bytes for plan in plans)
    assert {plan.missing_bytes for plan in plans} == {needed}
    monkeypatch.setattr("cache.plan.free_bytes", lambda _: needed - 1)
    with pytest.raises(ResourceError, match="are needed"):
        builder.run("train", SILENT, part=Part(0, COUNT))


def child(tmp_path: Path, name: str, code: str) -> Child:
    return Child(name, (sys.executable, "-c", code), dict(os.environ), tmp_path / f"{name}.log")


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("import sys; print('no such image'); sys.exit(3)", DataError, r"bad \(exit code 3\)(.|\n)*no such image"),
        ("import sys; sys.exit(1)", PipelineError, r"bad \(exit code 1\)"),
        ("import os; os.kill(os.getpid(), 9)", ResourceError, r"bad \(killed, most often because memory ran out\)"),
    ],
)
def test_a_process_that_fails_is_named_and_the_others_finish(
    tmp_path: Path, code: str, kind: type[PipelineError], message: str
) -> None:
    done = tmp_path / "done"
    good = child(tmp_path, "good", f"import time; time.sleep(0.5); open({str(done)!r}, 'w').close()")
    with pytest.raises(kind, match=message) as caught:
        run_children([good, child(tmp_path, "bad", code)], never)
    assert type(caught.value) is kind
    assert "1 of 2 processes failed" in caught.value.what
    assert "good" not in caught.value.what
    assert done.exists()
    run_children([good, good], never)


def test_a_request_to_stop_is_handed_on_once(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "count = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: count.append(1))\n"
        "print('ready', flush=True)\n"
        "while not count: time.sleep(0.01)\n"
        "time.sleep(0.5); print('signals', len(count)); sys.exit(143)"
    )
    children = [child(tmp_path, name, code) for name in ("one", "two")]

    def should_stop() -> bool:
        return all(one.log.exists() and "ready" in one.log.read_text() for one in children)

    with pytest.raises(StoppedError):
        run_children(children, should_stop)
    assert [one.log.read_text() for one in children] == ["ready\nsignals 1\n"] * 2


def test_a_request_that_comes_when_all_is_done_stops_nothing(tmp_path: Path) -> None:
    done = tmp_path / "stop"
    waits = f"import os, signal, time; signal.signal(15, lambda *_: open({str(done)!r}, 'w').close())\n"
    waits += f"print('ready', flush=True)\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"
    one = child(tmp_path, "one", waits)
    run_children([one], lambda: one.log.exists() and "ready" in one.log.read_text())
    assert done.exists(), "it was asked to stop, and ended well"
    failing = child(tmp_path, "two", waits + "; import sys\nsys.exit(3)")
    done.unlink()
    with pytest.raises(DataError):
        run_children([failing], lambda: failing.log.exists() and "ready" in failing.log.read_text())


def test_no_process_outlives_a_parent_that_gives_up(tmp_path: Path) -> None:
    one = child(tmp_path, "one", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")

    def interrupted() -> bool:
        if one.log.exists() and one.log.read_text():
            raise KeyboardInterrupt
        return False

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_children([one], interrupted)
    assert time.monotonic() - started < 55, "it was waited for"
    with pytest.raises(ProcessLookupError):
        os.kill(int(one.log.read_text()), 0)


def test_one_process_on_one_machine(whole: Any, tmp_path: Path) -> None:
    """The machinery of --gpus, with a process that sees no GPU; of several: test_rejected_by_parts."""
    config = elsewhere(whole[1], tmp_path / "parts")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["--config", str(tmp_path / "my.yaml"), "--split", "train", f"--set=cache.dir={tmp_path / 'parts'}"]
    text = cache_in_processes(config, arguments, "train", [environment], never)
    assert "9 distinct images" in text
    assert "encoded now      9 images" in text
    folder = builder_of(config).folder
    assert committed_keys(folder) == committed_keys(whole[0].folder)
    assert_same_entries(folder, whole[0].folder)
    figures = json.loads((config.output_dir / "cache-train.json").read_text())
    assert figures["encoded_images"] == 9
    assert figures["images_per_second"] == pytest.approx(9 / figures["seconds"], rel=0.01)
    again = cache_in_processes(config, arguments, "train", [environment], never)
    assert "encoded now      0 images, 0.00 images/s" in again
    kept = json.loads((config.output_dir / "cache-train.json").read_text())
    assert (kept["encoded_images"], kept["now"]["encoded_images"]) == (9, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_gpus_that_are_not_there(whole: Any) -> None:
    with pytest.raises(ConfigError, match="--gpus 2: 0 GPUs are visible here"):
        gpu_environments(whole[1], 2, alone=True)
    with pytest.raises(ConfigError, match="--gpus goes with neither"):
        gpu_environments(whole[1], 2, alone=False)


def test_each_process_sees_its_own_gpu(whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = [e["CUDA_VISIBLE_DEVICES"] for e in gpu_environments(whole[1], 3, alone=True)]
    assert seen == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc,7")
    assert [e["CUDA_VISIBLE_DEVICES"] for e in gpu_environments(whole[1], 2, alone=True)] == ["5", "GPU-abc"]
    named = whole[1].model_copy(update={"cache": whole[1].cache.model_copy(update={"device": "cuda:1"})})
    with pytest.raises(ConfigError, match=r"cache\.device: cuda:1"):
        gpu_environments(named, 2, alone=True)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
