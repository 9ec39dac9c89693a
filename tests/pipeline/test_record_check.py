"""Records that cannot be cached are told by `pipeline submit`, before each job of an array finds them by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import draw, record


@pytest.mark.parametrize(
    ("row", "sections", "parts"),
    [
        ("{", {}, ["train.jsonl:2", "JSON"]),
        (record("none.png"), {}, ["train.jsonl:2", "image none.png: the image file does not exist"]),
        (record("text.png"), {}, ["train.jsonl:2", "image text.png: "]),
        (record("good1.png"), {"cache": {"max_image_pixels": 64 * 48}}, ["train.jsonl:2", "cache.max_image_pixels"]),
        (record("thin.png"), {}, ["train.jsonl:2", "image thin.png: "]),
        (record("none.png"), {"data": {"on_bad_record": "report"}}, ["1 of 2 records cannot be used", "none.png"]),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_record_that_cannot_be_used_is_told_before_anything_is_submitted(
    run: Callable[..., Any],
    config: Callable[..., Path],
    folder: Path,
    tmp_path: Path,
    row: Any,
    sections: dict[str, Any],
    parts: list[str],
    dry: bool,
) -> None:
    (folder / "text.png").write_text("no picture")
    draw(folder / "thin.png", (900, 3))

    refused = run("submit", "--config", config(record("good0.png"), row, **sections), *(["--dry-run"] if dry else []))

    refused.check_refusal(3, *parts)
    assert not (tmp_path / "run" / "slurm" / "jobs.json").exists()


def test_records_of_a_split_that_is_cached_are_not_looked_at_again(run: Callable[..., Any], cached: Path) -> None:
    shown = run("submit", "--config", cached, "--dry-run")

    assert shown.code == 0, shown.err
    assert "1. train" in shown.out
    assert "reading image headers" not in shown.err
