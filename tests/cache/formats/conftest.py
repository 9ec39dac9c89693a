"""The exam that every shard format sits: a format's test module subclasses it and names the format."""

from __future__ import annotations

import multiprocessing
import os
import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from cache.features import VisionFeatures
from cache.formats import ShardFormat
from tests.cache.conftest import assert_same, random_features

KEYS = [f"{number:064x}" for number in range(0xA0, 0xAC)]


class ShardFormatExam:
    """Writes and reads real files; knows nothing of any format's layout."""

    shard_format: ClassVar[ShardFormat]

    def written(self, folder: Path, *features: VisionFeatures) -> Path:
        path = folder / f"shard{self.shard_format.suffix}"
        self.shard_format.write(path, list(zip(KEYS, features, strict=False)))
        return path

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("levels", [0, 1, 3])
    @pytest.mark.parametrize("tokens", [1, 7])
    def test_gives_back_every_bit(self, tmp_path: Path, dtype: str, levels: int, tokens: int) -> None:
        features = random_features(tokens, tokens=tokens, levels=levels, dtype=dtype)
        reader = self.shard_format.open(self.written(tmp_path, features))
        assert_same(reader.read(KEYS[0]), features)

    def test_keeps_the_bits_of_numbers_that_are_not_numbers(self, tmp_path: Path) -> None:
        features = random_features(0)
        features.image_embeds[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
        assert_same(self.shard_format.open(self.written(tmp_path, features)).read(KEYS[0]), features)

    def test_reads_in_any_order_and_again(self, tmp_path: Path) -> None:
        features = [random_features(n, tokens=n + 1) for n in range(len(KEYS))]
        reader = self.shard_format.open(self.written(tmp_path, *features))
        assert reader.keys() == sorted(KEYS)
        order = random.Random(0).choices(range(len(KEYS)), k=40)
        for number in order:
            assert_same(reader.read(KEYS[number]), features[number])

    def test_writes_what_a_slice_shows_and_not_what_lies_beside_it(self, tmp_path: Path) -> None:
        whole = random_features(0, tokens=40)
        strided = VisionFeatures(whole.image_embeds[::2], whole.deepstack_features[:, ::2], whole.image_grid_thw)
        rows = VisionFeatures(whole.image_embeds[3:9], whole.deepstack_features[:, 3:9], whole.image_grid_thw)
        turned = VisionFeatures(
            whole.image_embeds[:8].T, whole.deepstack_features[:, :8].transpose(1, 2), whole.image_grid_thw
        )
        path = self.written(tmp_path, strided, rows, turned)
        reader = self.shard_format.open(path)
        for key, features in zip(KEYS, (strided, rows, turned), strict=False):
            assert_same(reader.read(key), features)
        alone = VisionFeatures(*(t.clone() for t in (rows.image_embeds, rows.deepstack_features, rows.image_grid_thw)))
        (tmp_path / "alone").mkdir()
        (tmp_path / "slice").mkdir()
        assert self.written(tmp_path / "slice", rows).stat().st_size == (
            self.written(tmp_path / "alone", alone).stat().st_size
        )

    def test_takes_tensors_that_share_memory(self, tmp_path: Path) -> None:
        whole = random_features(0, tokens=12)
        parts = [
            VisionFeatures(whole.image_embeds[a:b], whole.deepstack_features[:, a:b], whole.image_grid_thw)
            for a, b in [(0, 6), (6, 12), (3, 9)]
        ]
        reader = self.shard_format.open(self.written(tmp_path, *parts))
        for key, features in zip(KEYS, parts, strict=False):
            assert_same(reader.read(key), features)

    def test_what_was_read_outlives_the_reader(self, tmp_path: Path) -> None:
        features = random_features(0)
        reader = self.shard_format.open(self.written(tmp_path, features))
        read = reader.read(KEYS[0])
        reader.close()
        assert_same(read, features)

    @pytest.mark.parametrize("tokens", [1, 7, 64])
    def test_reads_into_memory_that_is_given(self, tmp_path: Path, tokens: int) -> None:
        features = [random_features(n, tokens=tokens, dtype="bfloat16") for n in range(2)]
        reader = self.shard_format.open(self.written(tmp_path, *features))
        size = reader.extents(KEYS[0]).out_bytes
        out = torch.full((size + 100,), 7, dtype=torch.uint8)
        first, last = out.data_ptr(), out.data_ptr() + out.numel()
        for key, expected in zip(KEYS, features, strict=False):
            read = reader.read(key, out)
            assert_same(read, expected)
            assert all(first <= t.data_ptr() < last for t in (read.image_embeds, read.deepstack_features))
        assert bool((out[size:] == 7).all())
        assert_same(reader.read(KEYS[0]), features[0])
        assert_same(reader.read(KEYS[1], out), features[1])

    def test_memory_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        reader = self.shard_format.open(self.written(tmp_path, random_features(0)))
        size = reader.extents(KEYS[0]).out_bytes
        memory = torch.zeros(4 * size, dtype=torch.uint8)
        for out in (memory[: size - 1], memory[::2], memory.view(torch.float32), memory.view(4, -1), memory.to("meta")):
            with pytest.raises(TypeError, match="out "):
                reader.read(KEYS[0], out)

    def test_equal_entries_give_equal_files(self, tmp_path: Path) -> None:
        contents = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            path = self.written(tmp_path / name, *(random_features(n) for n in range(3)))
            os.utime(path, (0, 0))
            contents.append(path.read_bytes())
        assert contents[0] == contents[1]

    def test_threads_and_forked_processes_share_a_reader(self, tmp_path: Path) -> None:
        features = [random_features(n, tokens=50 + n) for n in range(len(KEYS))]
        reader = self.shard_format.open(self.written(tmp_path, *features))
        order = random.Random(0).choices(range(len(KEYS)), k=200)

        def check(number: int) -> None:
            assert_same(reader.read(KEYS[number]), features[number])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(check, order))

        def check_all(numbers: list[int]) -> None:
            for number in numbers:
                check(number)

        # No pool: it would wait for ever for the answers of a process that died.
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=check_all, args=(order[start::2],)) for start in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of fork beside threads
            for child in children:
                child.start()
        for child in children:
            child.join(60)
            child.kill()
        assert [child.exitcode for child in children] == [0, 0]

    def test_changing_what_was_read_changes_nothing_else(self, tmp_path: Path) -> None:
        features = random_features(0)
        path = self.written(tmp_path, features)
        reader = self.shard_format.open(path)
        before = path.read_bytes()
        reader.read(KEYS[0]).image_embeds.zero_()
        assert path.read_bytes() == before
        assert_same(self.shard_format.open(path).read(KEYS[0]), features)

    @pytest.mark.parametrize("key", ["f" * 64, "", KEYS[0][:-1], KEYS[0] + "/image_embeds"])
    def test_an_unknown_key_is_a_key_error(self, tmp_path: Path, key: str) -> None:
        reader = self.shard_format.open(self.written(tmp_path, random_features(0)))
        with pytest.raises(KeyError):
            reader.read(key)

    def test_a_truncated_shard_is_refused(self, tmp_path: Path) -> None:
        features = [random_features(n) for n in range(3)]
        path = self.written(tmp_path, *features)
        whole = path.read_bytes()
        places = {0, 1, 7, 8, 9, len(whole) - 1, *random.Random(1).choices(range(len(whole)), k=40)}
        refused = 0
        for place in sorted(places):
            path.write_bytes(whole[:place])
            try:
                reader = self.shard_format.open(path)
                for key, expected in zip(KEYS, features, strict=False):
                    assert_same(reader.read(key), expected)
            except (ValueError, OSError, KeyError):
                refused += 1
        assert refused == len(places)

    @pytest.mark.parametrize("size", [0, 1, 8, 100, 5000])
    def test_random_bytes_are_refused(self, tmp_path: Path, size: int) -> None:
        path = tmp_path / f"shard{self.shard_format.suffix}"
        for seed in range(5):
            path.write_bytes(random.Random(seed).randbytes(size))
            with pytest.raises((ValueError, OSError)):
                self.shard_format.open(path).read(KEYS[0])

    def test_a_missing_file_and_a_folder_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="missing"):
            self.shard_format.open(tmp_path / f"missing{self.shard_format.suffix}")
        with pytest.raises((ValueError, OSError)):
            self.shard_format.open(tmp_path)

    def test_a_folder_that_is_not_there_is_an_os_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            self.written(tmp_path / "nowhere", random_features(0))

    def test_a_named_pipe_is_refused_without_waiting(self, tmp_path: Path) -> None:
        path = tmp_path / f"shard{self.shard_format.suffix}"
        os.mkfifo(path)
        with pytest.raises(ValueError, match="not a regular file"):
            self.shard_format.open(path)
