"""Pruning shows what is there and deletes exactly what is named, and only when that is confirmed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from cache import repair
from cache.atomic import TEMPORARY_MARK
from cache.errors import ConfigError
from cache.fingerprint import expected_fingerprint
from cache.prune import Holding, remove_fingerprint, remove_leftovers, survey_holdings
from cache.repair import DAMAGED
from pipeline.cache_verbs import prune
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, snapshot


@pytest.fixture
def two(cached: Any) -> tuple[PipelineConfig, Path, Path]:
    """A configuration, its fingerprint's folder, and that of another resolution."""
    builder, config = cached
    smaller = config.cache.model_copy(update={"max_pixels": 64 * 64})
    other = builder_of(config.model_copy(update={"cache": smaller}))
    other.run("train", SILENT)
    return config, builder.folder, other.folder


def holdings(config: PipelineConfig) -> list[Holding]:
    wanted = expected_fingerprint(config.model, config.cache)
    return survey_holdings(config.cache_dir, wanted, any_backend=True)


def test_every_fingerprint_is_shown_and_nothing_is_deleted(two: Any) -> None:
    config, used, other = two
    before = snapshot(config.cache_dir)
    found = {holding.folder: holding for holding in holdings(config)}
    assert set(found) == {used, other}
    assert (found[used].in_use, found[other].in_use) == (True, False)
    assert found[used].num_images == found[other].num_images == 4
    assert found[used].num_bytes == sum(size for _, size, _ in snapshot(used).values())
    assert found[used].splits == ["train"]
    text = prune(config, fingerprint=None, leftovers=False, yes=True)
    for part in (used.name, other.name, "float32", "max_pixels 16384", "max_pixels 4096", config.model.name_or_path):
        assert part in text
    for options in ({"fingerprint": other.name, "leftovers": True}, {"fingerprint": None, "leftovers": True}):
        assert "nothing was deleted" in prune(config, **options, yes=False)
    assert snapshot(config.cache_dir) == before


@pytest.mark.parametrize("which", [1, 2])
def test_exactly_the_named_one_is_deleted(two: Any, which: int) -> None:
    config, gone, kept = two[0], two[which], two[3 - which]
    before = snapshot(kept)
    assert gone.name in prune(config, fingerprint=gone.name, leftovers=False, yes=True)
    assert not gone.exists()
    assert snapshot(kept) == before


@pytest.mark.parametrize("name", ["", ".", "..", "../images", "0123456789abcdef", "*"])
def test_what_is_no_fingerprint_is_not_deleted(two: Any, name: str) -> None:
    config, used, other = two
    before = snapshot(config.cache_dir.parent)
    for yes in (True, False):
        with pytest.raises(ConfigError, match="there is no fingerprint") as caught:
            prune(config, fingerprint=name, leftovers=False, yes=yes)
        assert used.name in str(caught.value.do)
    assert snapshot(config.cache_dir.parent) == before
    with pytest.raises(ConfigError):
        remove_fingerprint(holdings(config), str(used))
    assert other.exists()


def test_other_folders_and_links_are_no_holdings(two: Any, tmp_path: Path) -> None:
    config, used, _ = two
    (config.cache_dir / "notes").mkdir()
    elsewhere = Path(shutil.copytree(used, tmp_path / "elsewhere"))
    (config.cache_dir / ("f" * 16)).symlink_to(elsewhere)
    assert len(holdings(config)) == 2
    with pytest.raises(ConfigError):
        prune(config, fingerprint="f" * 16, leftovers=False, yes=True)
    assert snapshot(elsewhere)


def test_only_stale_temporary_files_and_damaged_ones_are_leftovers(two: Any) -> None:
    config, used, other = two
    before = snapshot(config.cache_dir)
    old, young = (used / "shards" / f"shard-{n}.safetensors{TEMPORARY_MARK}0000" for n in (1, 2))
    aside, unlisted = other / DAMAGED / "shard-3.safetensors.aa", used / "shards" / "shard-4.safetensors"
    aside.parent.mkdir()
    for file in (old, young, aside, unlisted):
        file.write_bytes(b"1234")
    for file in (old, unlisted):
        os.utime(file, (time.time() - 4000,) * 2)
    text = prune(config, fingerprint=None, leftovers=False, yes=False)
    assert "2 temporary files, 1 of them older than an hour" in text
    assert "1 damaged files that were moved aside" in text
    assert "1 shards without an index" in text
    assert sorted(remove_leftovers(holdings(config))) == sorted([old, aside])
    young.unlink()
    unlisted.unlink()
    assert snapshot(config.cache_dir) == before


def test_remains_without_a_manifest_are_shown_and_can_be_deleted(two: Any) -> None:
    config, _, other = two
    (other / "manifest.json").unlink()
    assert "the manifest is missing or damaged" in prune(config, fingerprint=None, leftovers=False, yes=False)
    prune(config, fingerprint=other.name, leftovers=False, yes=True)
    assert not other.exists()


def test_an_empty_place(cached: Any, tmp_path: Path) -> None:
    config = cached[1]
    moved = config.model_copy(update={"cache": config.cache.model_copy(update={"dir": tmp_path / "nothing"})})
    assert "nothing in" in prune(moved, fingerprint=None, leftovers=False, yes=False)


def test_files_that_vanish_while_they_are_looked_at_are_passed_over(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process renames its temporary file, moves a shard aside, or removes the whole fingerprint."""
    config, used, other = two
    young = used / "shards" / f"shard-1.safetensors{TEMPORARY_MARK}0000"
    unlisted = used / "shards" / "shard-2.safetensors"
    walk = os.walk

    def vanishing(folder: Path) -> Any:
        for found in walk(folder):
            young.unlink(missing_ok=True)
            yield found

    def before() -> list[Holding]:
        young.write_bytes(b"1234")
        return holdings(config)

    whole = {holding.folder: holding.num_bytes for holding in before()}
    monkeypatch.setattr(os, "walk", vanishing)
    assert {holding.folder: holding.num_bytes for holding in before()} == {**whole, used: whole[used] - 4}
    index_of = repair._index_of

    def moving(shard: Path) -> Path:
        unlisted.unlink(missing_ok=True)
        return index_of(shard)

    unlisted.write_bytes(b"1234")
    os.utime(unlisted, (time.time() - 4000,) * 2)
    monkeypatch.setattr(repair, "_index_of", moving)
    assert [holding.unlisted for holding in holdings(config)] == [[], []]

    def removing(folder: Path) -> Any:
        for found in walk(folder):
            shutil.rmtree(other, ignore_errors=True)
            yield found

    monkeypatch.setattr(os, "walk", removing)
    assert [holding.num_images for holding in holdings(config) if holding.folder == used] == [4]
