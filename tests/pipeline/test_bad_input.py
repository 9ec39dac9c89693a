"""What users get wrong: each gives one clear message, the documented exit code, no traceback, and nothing is lost."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

Row = dict[str, Any]
ENOUGH = {"on_bad_record": "report", "max_bad_share": 0.5}


def picture(mode: str = "RGB", size: tuple[int, int] = (64, 48), kind: str = "PNG", **options: Any) -> bytes:
    """An encoded image."""
    image = Image.new("RGB", size, (200, 30, 60))
    image.paste((20, 120, 220), (0, 0, size[0] // 2, size[1]))
    buffer = BytesIO()
    image.convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes whose header claims 40000 x 40000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    pixels = b"IDAT" + zlib.compress(b"\0" * 1000)
    return start + struct.pack(">I", len(pixels) - 4) + pixels + struct.pack(">I", zlib.crc32(pixels))


def row(image: str | None = "good0.png", question: str = "Which colours?", answer: object = "Red and blue.") -> Row:
    """A flat row."""
    return {**({} if image is None else {"image": image}), "question": question, "answer": answer}


def rejected(tmp_path: Path) -> list[Row]:
    """The lines of train.rejected.jsonl."""
    return [json.loads(line) for line in (tmp_path / "run" / "train.rejected.jsonl").read_text().splitlines()]


BAD_IMAGES = {
    "missing": (None, "does not exist"),
    "empty": (b"", "is empty (0 bytes)"),
    "truncated": (picture(kind="JPEG")[:300], "cannot be"),
    "cut header": (picture()[:20], "header of the PNG image cannot be read"),
    "not an image": (b"<html>not found</html>", "not an image in a format that can be read"),
    "PDF": (b"%PDF-1.7 ...", "not an image"),
    "1:300": (picture(size=(300, 1)), "neither more than 200 times the other"),
    "bomb": (bomb(), "max_image_pixels"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_an_image_that_cannot_be_used(
    run: Callable[..., Any], config: Callable[..., Path], folder: Path, tmp_path: Path, name: str
) -> None:
    content, reason = BAD_IMAGES[name]
    if content is not None:
        (folder / "bad.png").write_bytes(content)
    rows = [row(), row("bad.png"), row("good1.png")]

    refused = run("cache", "--config", config(*rows), "--split", "train")
    refused.check_refusal(3, "train.jsonl:2: ", "bad.png", reason, "data.on_bad_record: report")

    reporting = config(*rows, data=ENOUGH)
    cached = run("cache", "--config", reporting, "--split", "train")
    assert cached.code == 0, cached.err
    assert "left out         1 records, listed in " in cached.out
    (line,) = rejected(tmp_path)
    assert line["source"].endswith("train.jsonl:2")
    assert "bad.png" in line["reason"]
    trained = run("train", "--config", reporting, "--from-cache")
    assert trained.code == 0, trained.err

    strict = config(*rows, data={**ENOUGH, "max_bad_share": 0.1})
    too_many = run("cache", "--config", strict, "--split", "train")
    too_many.check_refusal(3, "1 of 3 records cannot be used: 33.33%", "10.00% of data.max_bad_share", "bad.png")


@pytest.mark.parametrize("name", ["missing", "empty", "truncated", "not an image", "1:300", "bomb"])
def test_an_image_that_cannot_be_used_on_the_live_path(
    run: Callable[..., Any], config: Callable[..., Path], folder: Path, name: str
) -> None:
    content, reason = BAD_IMAGES[name]
    if content is not None:
        (folder / "bad.png").write_bytes(content)

    refused = run("train", "--config", config(row(), row("bad.png")))

    refused.check_refusal(3, "bad.png", reason, "data.on_bad_record: report")


FINE_IMAGES = {
    "1x1": picture(size=(1, 1)),
    "a JPEG named .png": picture(kind="JPEG"),
    "CMYK": picture("CMYK", kind="JPEG"),
    "palette": picture("P"),
    "16-bit": picture("I;16"),
    "grey": picture("L"),
    "alpha": picture("RGBA"),
    "rotated": picture(kind="JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
}


def test_images_that_are_fine(run: Callable[..., Any], config: Callable[..., Path], folder: Path) -> None:
    rows = []
    for number, content in enumerate(FINE_IMAGES.values()):
        (folder / f"fine{number}.png").write_bytes(content)
        rows.append(row(f"fine{number}.png"))
    file = config(*rows)

    cached = run("cache", "--config", file, "--split", "train")
    trained = run("train", "--config", file, "--from-cache")

    assert cached.code == 0, cached.err
    assert f"encoded now      {len(FINE_IMAGES)} images" in cached.out
    assert trained.code == 0, trained.err


def conversation(*turns: tuple[str, str], images: tuple[str, ...] = ()) -> Row:
    """A ShareGPT row."""
    return {"messages": [{"role": role, "content": text} for role, text in turns], "images": list(images)}


BAD_ROWS: dict[str, tuple[Row | str, str]] = {
    "malformed JSON": ('{"image": "good0.png", "question":', "malformed JSON"),
    "not an object": ("[1, 2]", "not an object with named fields"),
    "missing answer": ({"image": "good0.png", "question": "What?"}, "answer"),
    "missing question": ({"image": "good0.png", "answer": "Red."}, "question"),
    "null answer": (row(answer=None), "field 'answer' is null"),
    "empty answer": (row(answer="  "), "field 'answer' is empty"),
    "answer of another type": (row(answer=["a"]), "field 'answer' is list"),
    "too many <image>": (row(question="<image><image> What?"), "the text has 2 <image>, the row names 1 images"),
    "path with ..": (row("../outside.png"), "leaves the image root"),
    "absolute path": (row("/etc/hostname"), "leaves the image root"),
    "symlink": (row("link.png"), "leaves the image root"),
    "URL": (row("https://example.com/a.png"), "is a URL"),
    "a folder": (row("sub"), "sub"),
}
BAD_TURNS: dict[str, tuple[Row, str]] = {
    "unknown role": (conversation(("user", "Hi"), ("robot", "Ho")), "unknown role 'robot'"),
    "no assistant": (conversation(("user", "Hi")), "no assistant turn to learn from"),
    "ends with the user": (conversation(("user", "a"), ("assistant", "b"), ("user", "c")), "last turn is a user turn"),
    "too few <image>": (
        conversation(("user", "<image> a"), ("assistant", "b"), images=("good0.png", "good1.png")),
        "the text has 1 <image>, the row names 2 images",
    ),
    "image in an answer": (conversation(("user", "a"), ("assistant", "<image>"), images=("good0.png",)), "<image>"),
}


def check_bad_row(run: Callable[..., Any], files: tuple[Path, Path], reason: str, tmp_path: Path) -> None:
    """A row on line 2 is refused, and left out with `report`, by cache as well as by train."""
    failing, reporting = files
    refused = run("cache", "--config", failing, "--split", "train")
    refused.check_refusal(3, "train.jsonl:2", reason)
    live = run("train", "--config", failing)
    live.check_refusal(3, "train.jsonl:2", reason)

    cached = run("cache", "--config", reporting, "--split", "train")
    assert cached.code == 0, cached.err
    (line,) = rejected(tmp_path)
    assert "train.jsonl:2" in line["source"]
    assert reason in line["reason"]


def two_configs(config: Callable[..., Path], *rows: Row | str) -> tuple[Path, Path]:
    """The same rows with `fail` and with `report`."""
    reporting = config(*rows, data=ENOUGH)
    kept = reporting.with_name("reporting.yaml")
    kept.write_text(reporting.read_text())
    return config(*rows), kept


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_row_that_cannot_be_used(
    run: Callable[..., Any], config: Callable[..., Path], folder: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "outside.png").write_bytes(picture())
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "sub").mkdir()
    bad, reason = BAD_ROWS[name]

    check_bad_row(run, two_configs(config, row(), bad, row("good1.png")), reason, tmp_path)


@pytest.mark.parametrize("name", BAD_TURNS)
def test_a_conversation_that_cannot_be_used(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    bad, reason = BAD_TURNS[name]
    good = conversation(("user", "<image>Which?"), ("assistant", "Red."), images=("good0.png",))

    check_bad_row(run, two_configs(config, good, bad, good), reason, tmp_path)


def test_a_record_longer_than_the_context_is_never_cut(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    rows = [row(), row(question="long " * 200), row("good1.png")]
    failing, reporting = two_configs(config, *rows)
    assert run("cache", "--config", failing, "--split", "train").code == 0

    refused = run("train", "--config", failing, "--from-cache", "--set", "data.max_length=60")
    refused.check_refusal(3, "train.jsonl:2: ", "more than data.max_length = 60", "never cut")

    trained = run("train", "--config", reporting, "--from-cache", "--set", "data.max_length=60")
    assert trained.code == 0, trained.err
    dry = run("train", "--config", reporting, "--from-cache", "--set", "data.max_length=60", "--dry-run")
    assert "2 samples, 1 records left out" in dry.out


def test_training_lists_what_it_leaves_out(
    run: Callable[..., Any], config: Callable[..., Path], tmp_path: Path
) -> None:
    file = config(row(), row(question="long " * 200), row("good1.png"), data=ENOUGH)
    assert run("cache", "--config", file, "--split", "train").code == 0
    assert run("train", "--config", file, "--from-cache", "--set", "data.max_length=60").code == 0

    (line,) = rejected(tmp_path)
    assert line["source"].endswith("train.jsonl:2")
    assert "data.max_length = 60" in line["reason"]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("train.jsonl", "", ("the dataset has no usable record",)),
        ("train.jsonl", "\n\n", ("the dataset has no usable record",)),
        ("train.json", "[]", ("the dataset has no usable record",)),
        ("train.json", '{"rows": []}', ('not a list of rows or {"data": [...]}',)),
        ("train.json", '[{"question": ', ("malformed JSON",)),
        ("train.json", '{"a": 1}\n{"a": 2}\n', ("malformed JSON", "a file with one row a line is named .jsonl")),
        ("train.csv", "a,b\n", ("files of the kind '.csv' are not read",)),
        ("train.jsonl", '{"text": "a"}\n', ("the row's format is not recognised; it has the keys: text",)),
        ("missing.jsonl", None, ("there is no such file or folder",)),
    ],
)
def test_a_dataset_that_cannot_be_used(
    run: Callable[..., Any],
    write_config: Callable[..., Path],
    folder: Path,
    name: str,
    content: str | None,
    parts: tuple[str, ...],
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    file = write_config({"train": str(folder / name)})

    run("cache", "--config", file, "--split", "train").check_refusal(3, name, *parts)
    run("train", "--config", file).check_refusal(3, name, *parts)


def test_a_split_that_is_not_configured(run: Callable[..., Any], config: Callable[..., Path]) -> None:
    file = config(row())

    run("cache", "--config", file, "--split", "vall").check_refusal(2, "unknown split 'vall'", "use one of: train")
    run("train", "--config", file, "--set", "train.split=tarin").check_refusal(2, "unknown split 'tarin'")
    run("train", "--config", file, "--set", "train.eval_split=dev").check_refusal(2, "train.eval_split is 'dev'")
