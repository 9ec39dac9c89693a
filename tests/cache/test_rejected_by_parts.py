"""The list of records left out is the split's, whoever writes it: one process, parts by hand, or a process per GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.errors import DataError
from cache.parts import WHOLE, Part, part_of
from cache.split_files import load_refused
from pipeline.cache_verbs import cache_in_processes
from pipeline.config import PipelineConfig

from .conftest import SILENT, assert_same_entries, builder_of, committed_keys, draw_images, write_rows

COUNT = 3


def truncate(file: Path) -> None:
    """The header is whole: only decoding finds it."""
    file.write_bytes(file.read_bytes()[:-200])


@pytest.fixture
def config(tmp_path: Path, make_config: Callable[..., PipelineConfig]) -> PipelineConfig:
    """Two images of each part cannot be decoded, one is no image, rows name two of them, and a row is no row."""
    images = draw_images(tmp_path / "images", 24)
    for file in images[::4]:
        truncate(file)
    images[1].write_bytes(b"no image")
    names = [str(file.relative_to(tmp_path)) for file in images]
    pairs = [[names[a], names[b]] for a, b in ((0, 4), (8, 2), (12, 1), (3, 20))]
    rows = write_rows(tmp_path / "train.jsonl", [*pairs, *names])
    rows.write_text(rows.read_text() + '{"image": 5}\n')
    return make_config({"train": str(rows)}, data={"on_bad_record": "report", "max_bad_share": 0.6})


def in_folder(config: PipelineConfig, folder: Path) -> PipelineConfig:
    cache = config.cache.model_copy(update={"dir": folder / "features"})
    return config.model_copy(update={"cache": cache, "output_dir": folder})


def run(config: PipelineConfig, part: Part = WHOLE) -> Any:
    return builder_of(config).run("train", SILENT, part=part, list_rejected_in=config.output_dir)


def rejected(config: PipelineConfig) -> list[dict[str, str]]:
    (file,) = config.output_dir.glob("*.rejected.jsonl")
    assert file.name == "train.rejected.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0, 2)])
def test_parts_by_hand_leave_the_list_of_one_process(
    config: PipelineConfig, tmp_path: Path, order: tuple[int, ...]
) -> None:
    one, parts = in_folder(config, tmp_path / "one"), in_folder(config, tmp_path / "parts")
    whole = run(one)
    assert len(rejected(one)) == len(whole.rejected) == 12
    assert {part_of(key, COUNT) for key in load_refused(builder_of(one).folder)} == set(range(COUNT))
    for index in order:
        summary = run(parts, Part(index, COUNT))
    assert rejected(parts) == rejected(one)
    assert summary.figures()["num_rejected"] == whole.figures()["num_rejected"]


def test_a_process_for_each_gpu_leaves_it_too(config: PipelineConfig, tmp_path: Path) -> None:
    one, parts = in_folder(config, tmp_path / "one"), in_folder(config, tmp_path / "parts")
    run(one)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    places = {"cache.dir": parts.cache_dir, "output_dir": parts.output_dir}
    settings = [f"--set={name}={place}" for name, place in places.items()]
    arguments = ["--config", str(tmp_path / "my.yaml"), "--split", "train", *settings]
    text = cache_in_processes(parts, arguments, "train", [environment] * 2, lambda: False)
    assert rejected(parts) == rejected(one)
    assert f"left out         12 records, listed in {parts.output_dir / 'train.rejected.jsonl'}" in text
    figures = json.loads((parts.output_dir / "cache-train.json").read_text())
    assert (figures["num_rejected"], figures["encoded_images"]) == (12, 17)
    assert figures["images_per_second"] == pytest.approx(17 / figures["seconds"], rel=0.01)
    assert committed_keys(parts.cache_dir) == committed_keys(one.cache_dir)
    assert_same_entries(builder_of(parts).folder, builder_of(one).folder)


def test_a_mended_image_leaves_the_list(config: PipelineConfig, tmp_path: Path) -> None:
    parts = in_folder(config, tmp_path / "parts")
    for index in range(COUNT):
        run(parts, Part(index, COUNT))
    before = rejected(parts)
    draw_images(tmp_path / "images", 1)  # 0-0.png as it was
    for index in range(COUNT):
        run(parts, Part(index, COUNT))
    after = rejected(parts)
    assert len(after) == len(before) - 1, "the pair of it and another one is still left out"
    assert [line["source"] for line in after] == [
        line["source"] for line in before if "images/0-0.png" not in line["reason"] or line["source"].endswith(":1")
    ]


def test_the_share_of_bad_records_is_that_of_all_parts(config: PipelineConfig, tmp_path: Path) -> None:
    strict = config.data.model_copy(update={"max_bad_share": 11 / 29})
    parts = in_folder(config, tmp_path / "parts").model_copy(update={"data": strict})
    run(parts, Part(0, COUNT))
    run(parts, Part(1, COUNT))
    with pytest.raises(DataError, match="12 of 29"):
        run(parts, Part(2, COUNT))
    assert len(rejected(parts)) == 12, "the list is there to look at"


def test_with_fail_a_note_of_another_part_ends_no_part(config: PipelineConfig, tmp_path: Path) -> None:
    """The part that the image belongs to tells; the note may be older than a program that can decode it."""
    parts = in_folder(config, tmp_path / "parts")
    images = draw_images(tmp_path / "images", 24)
    write_rows(tmp_path / "train.jsonl", images)
    truncate(images[0])
    for index in range(COUNT):
        run(parts, Part(index, COUNT))
    (key,) = load_refused(builder_of(parts).folder)
    failing = parts.model_copy(update={"data": parts.data.model_copy(update={"on_bad_record": "fail"})})
    for index in range(COUNT):
        if index != part_of(key, COUNT):
            assert run(failing, Part(index, COUNT)).rejected == []
    with pytest.raises(DataError, match=r"images/0-0\.png"):
        run(failing, Part(part_of(key, COUNT), COUNT))


def test_images_that_could_not_be_decoded_cost_no_reading_of_all_entries(
    config: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compact index says what is committed; of a large cache the shards' own ones take minutes."""
    run(config)
    before = rejected(config)
    assert load_refused(builder_of(config).folder)
    for module in ("cache.manifest", "cache.index"):
        monkeypatch.setattr(f"{module}.load_shard_index", None)
    assert run(config).encoded_images == 0
    assert rejected(config) == before
