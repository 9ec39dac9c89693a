"""What a plan says beforehand is what caching does afterwards; duplicates go by content; rates give times."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageFile

from cache.checkpoint import VisionWeights
from cache.errors import DataError
from cache.estimate import STORAGE_DTYPES, FeatureShape, Rates
from cache.headers import HEAD_BYTES, Header, content_ids, read_headers
from cache.preprocess import header_size
from cache.rates import ENOUGH_IMAGES, find_rates, keep_better_rate
from cache.records import ImageRef
from cache.survey import Survey, survey_splits
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, draw_images, write_rows

MakeConfig = Callable[..., PipelineConfig]


def survey(config: PipelineConfig, *, rates: Rates | None = None) -> Survey:
    return survey_splits(
        config.model,
        config.data,
        config.cache,
        target=config.cache_dir,
        splits=list(config.data.splits),
        rates=rates or Rates(),
        progress=SILENT,
    )


@pytest.fixture
def splits(tmp_path: Path, make_config: MakeConfig) -> PipelineConfig:
    """train: five images, one of them under two names, two questions on one; val: two of them and one of its own."""
    images = draw_images(tmp_path / "images", 6)
    copy = Path(shutil.copy(images[0], tmp_path / "images" / "copy.png"))
    train = write_rows(tmp_path / "train.jsonl", [*images[:5], images[1], copy])
    val = write_rows(tmp_path / "val.jsonl", [images[2], copy, images[5]])
    return make_config({"train": str(train), "val": str(val)})


def test_the_plan_is_what_is_done(splits: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", None)
        patch.setattr(VisionWeights, "find", None)
        planned = survey(splits).figures()["splits"]
    builder = builder_of(splits)
    done = {split: builder.run(split, SILENT) for split in ("train", "val")}
    for split, summary in done.items():
        assert planned[split]["records"] == summary.num_records
        assert planned[split]["distinct_images"] == summary.distinct_images
        assert planned[split]["image_tokens"] == summary.image_tokens
    assert (planned["train"]["image_uses"], planned["val"]["image_uses"]) == (7, 3)
    together = planned["together"]
    assert together["distinct_images"] == 6
    written = done["train"].written_bytes + done["val"].written_bytes
    headers = written - together["bytes"]["float32"]["total"]
    assert 0 <= headers <= 2 * 8192
    for counts in (together["resolutions"], together["tokens_per_image"]):
        assert sum(counts.values()) == 6


def test_levels_add_up_and_match_the_known_sizes() -> None:
    shape = FeatureShape(hidden_size=4096, num_deepstack_levels=3)
    assert shape.bytes_per_token("bfloat16") == 32 * 1024, "the 8B: 32 KiB a token"
    assert shape.bytes_per_token("int8") < 0.51 * shape.bytes_per_token("bfloat16")
    for dtype in STORAGE_DTYPES:
        levels = shape.by_level(dtype, 1280)
        assert sum(size for name, size in levels.items() if name != "total") == levels["total"]
        assert set(levels) == {"main", "deepstack.0", "deepstack.1", "deepstack.2", "total"}
    assert shape.by_level("bfloat16", 1280)["total"] == 40 << 20, "1036x1288: 40 MiB"
    assert set(FeatureShape(8, 0).by_level("float32", 1)) == {"main", "total"}


def test_hours_rates_and_epochs(splits: PipelineConfig) -> None:
    rates = Rates(images_per_second=0.5, samples_per_second=4.0, sources={"images_per_second": "0.5, given"})
    found = survey(splits, rates=rates)
    train = found.figures()["splits"]["train"]
    assert train["hours_to_cache"] == pytest.approx(5 / 0.5 / 3600)
    assert train["tower_hours_saved_per_epoch_at_most"] == pytest.approx(7 / 0.5 / 3600)
    assert train["epochs_until_it_pays_at_best"] == pytest.approx(5 / 7)
    assert train["epochs_until_it_pays_at_worst"] == 1
    assert train["hours_per_epoch_from_cache"] == pytest.approx(7 / 4 / 3600)
    features = found.splits[0]
    per_sample = features.used_tokens * found.shape.bytes_per_token("float32") / 7
    each = "read_megabytes_per_second_each_image_"
    assert train[f"{each}for_each_sample"] == pytest.approx(4 * per_sample / 1e6)
    once = features.tokens * found.shape.bytes_per_token("float32") / 7
    assert train[f"{each}once_an_epoch"] == pytest.approx(4 * once / 1e6)
    text = found.describe()
    assert "assumed:" in text
    said = {line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in reversed(text.splitlines())}
    assert said["time to cache"] == "10 s"
    assert said["tower time saved an epoch, at most"] == "14 s"
    assert said["epochs until it pays, at best"] == "0.71"
    assert said["an epoch from the cache"] == "1.8 s"
    assert said["it reads, each image for each sample"].endswith("kB/s")
    unknown = survey(splits)
    assert "hours_to_cache" not in unknown.figures()["splits"]["train"]
    assert "no rate is known yet" in unknown.describe()


@pytest.mark.parametrize(("per_hour", "said"), [(5.0, "1 h"), (5 / 25.0, "25 h"), (20.0, "15 min"), (9000.0, "2 s")])
def test_times_are_in_units_that_can_be_read(splits: PipelineConfig, per_hour: float, said: str) -> None:
    text = survey(splits, rates=Rates(images_per_second=per_hour / 3600, sources={"images_per_second": ""})).describe()
    line = next(line for line in text.splitlines() if line.startswith("  time to cache  "))
    assert line.endswith(f" {said}")


def test_short_space_is_said(splits: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "NOT ENOUGH SPACE" not in survey(splits).describe()
    monkeypatch.setattr("cache.survey.free_bytes", lambda _: 10)
    assert "NOT ENOUGH SPACE" in survey(splits).describe()


def test_images_that_cannot_be_used_are_counted_and_named(splits: PipelineConfig, tmp_path: Path) -> None:
    (tmp_path / "images" / "0-3.png").write_bytes(b"no image")
    (tmp_path / "images" / "0-4.png").unlink()
    train = survey(splits).figures()["splits"]["train"]
    assert set(train["refused_images"]) == {"images/0-3.png", "images/0-4.png"}
    assert (train["records"], train["distinct_images"]) == (5, 3)


def refs_of(*files: Path) -> list[ImageRef]:
    return [ImageRef(file.name, file=file) for file in files]


def noise(file: Path, **options: Any) -> Path:
    """Larger than the leading bytes that are read."""
    Image.effect_noise((500, 400), 80).convert("RGB").save(file, **options)
    assert file.stat().st_size > HEAD_BYTES
    return file


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tiff", "a.bmp", "a.ppm", "a.gif"])
def test_sizes_from_leading_bytes(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"quality": 95} if name.endswith(("jpg", "webp")) else {}
    if name.endswith("jpg"):
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    file = noise(tmp_path / name, **options)
    (header,) = read_headers(refs_of(file), SILENT)
    assert isinstance(header, Header)
    assert (header.height, header.width) == header_size(file.read_bytes(), where="")
    assert header.width == (400 if name.endswith("jpg") else 500)


@pytest.mark.parametrize("metadata", [0, HEAD_BYTES, 3 * HEAD_BYTES])
def test_a_cameras_metadata_is_no_reason_to_read_the_whole_file(
    metadata: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(_: ImageRef) -> bytes:
        raise AssertionError("read whole")

    file = noise(tmp_path / "a.jpg", quality=95)
    content = file.read_bytes()
    segment = b"\xff\xfe" + (metadata + 2).to_bytes(2, "big") + bytes(metadata)
    file.write_bytes(content[:2] + segment + content[2:])
    monkeypatch.setattr(ImageRef, "read", whole)
    (header,) = read_headers(refs_of(file), SILENT)
    assert isinstance(header, Header)
    assert (header.height, header.width) == (400, 500)


def test_metadata_longer_than_the_leading_bytes(tmp_path: Path) -> None:
    file = noise(tmp_path / "a.jpg", quality=95)
    whole = file.read_bytes()
    segment = b"\xff\xfe" + (60_002).to_bytes(2, "big") + bytes(60_000)
    file.write_bytes(whole[:2] + 3 * segment + whole[2:])
    (header,) = read_headers(refs_of(file), SILENT)
    assert isinstance(header, Header)
    assert (header.height, header.width) == (400, 500)


def test_contents_that_differ_late_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = noise(tmp_path / "one.jpg", quality=95)
    same = Path(shutil.copy(one, tmp_path / "same.jpg"))
    late = tmp_path / "late.jpg"
    late.write_bytes(one.read_bytes()[:-1] + b"\0")
    longer = tmp_path / "longer.jpg"
    longer.write_bytes(one.read_bytes() + b"\0")
    small, twin = draw_images(tmp_path / "small", 1)[0], tmp_path / "twin.png"
    shutil.copy(small, twin)
    refs = refs_of(one, same, late, longer, small, twin)
    headers = [header for header in read_headers(refs, SILENT) if isinstance(header, Header)]
    read: list[str] = []
    whole = ImageRef.read
    monkeypatch.setattr(ImageRef, "read", lambda self: read.append(self.path) or whole(self))
    ids = list(content_ids(list(zip(refs, headers, strict=True))))
    assert ids[0] == ids[1]
    assert ids[4] == ids[5]
    assert len(set(ids)) == 4
    assert read == ["one.jpg", "same.jpg", "late.jpg"], "only what has a likeness is read whole"


def test_what_is_no_image_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jpg"
    empty.touch()
    os.mkfifo(tmp_path / "pipe.jpg")
    refs = refs_of(empty, tmp_path / "missing.jpg", tmp_path, tmp_path / "pipe.jpg")
    errors = read_headers(refs, SILENT)
    for ref, error in zip(refs, errors, strict=True):
        assert isinstance(error, DataError)
        assert error.where == ref.path


def test_rates_are_found_or_given(tmp_path: Path) -> None:
    assert find_rates(tmp_path, images_per_second=None, samples_per_second=None) == Rates()
    for split, count, rate in (("train", 100, 8.0), ("val", 3, 1.0), ("train.part-0-of-2", 999, 4.0)):
        figures = {"encoded_images": count, "images_per_second": rate}
        (tmp_path / f"cache-{split}.json").write_text(json.dumps(figures))
    lines = [{"samples_per_second": rate} for rate in (1.0, 5.0, 6.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"samples_pe')
    found = find_rates(tmp_path, images_per_second=None, samples_per_second=None)
    assert (found.images_per_second, found.samples_per_second) == (8.0, 5.0)
    assert "cache-train.json" in found.sources["images_per_second"]
    given = find_rates(tmp_path, images_per_second=2.0, samples_per_second=None)
    assert (given.images_per_second, given.sources["images_per_second"]) == (2.0, "2, given")


@pytest.mark.parametrize(
    ("before", "now", "kept"),
    [
        (100, 0, 100),
        (100, 3, 100),
        (100, 100, 100),
        (3, 100, 100),
        (10 * ENOUGH_IMAGES, ENOUGH_IMAGES - 1, 10 * ENOUGH_IMAGES),
        (10 * ENOUGH_IMAGES, ENOUGH_IMAGES, ENOUGH_IMAGES),
        (0, 0, 0),
    ],
)
def test_a_few_more_images_leave_the_rate_that_was_measured(tmp_path: Path, before: int, now: int, kept: int) -> None:
    def figures(count: int, records: int) -> dict[str, Any]:
        measured = {"encoded_images": count, "seconds": 2.0 * records, "images_per_second": count / 2}
        return {"split": "train", "num_records": records, **measured}

    file = tmp_path / "cache-train.json"
    assert keep_better_rate(file, figures(before, 1)) == figures(before, 1), "the first run"
    file.write_text(json.dumps(figures(before, 1)))
    found = keep_better_rate(file, figures(now, 2))
    assert found["num_records"] == 2, "what is said of the split is always of the latest run"
    assert (found["encoded_images"], found["images_per_second"]) == (kept, kept / 2)
    file.write_text('{"encoded_ima')
    assert keep_better_rate(file, figures(now, 2)) == figures(now, 2)
