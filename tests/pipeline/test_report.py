"""The report is opened by people who were sent one file: it must be whole, safe and readable without the run."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from cache.errors import ConfigError, DataError
from pipeline.report import ReportSample, write_report

VOID = {"meta", "img", "br", "line", "polyline", "circle"}


class Page(HTMLParser):
    """Checks that tags are closed in order and collects what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def png(width: int = 64, height: int = 48) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, "PNG")
    return buffer.getvalue()


def run_folder(folder: Path, steps: int = 40) -> Path:
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "loss": 4.0 / step, "learning_rate": 1e-4, "grad_norm": 0.5, "samples_per_second": 1234.5}
        lines.append(line | {"image_tokens_per_second": 14000.0, "data_wait_share": 0.01})
        if step % 10 == 0:
            lines.append({"step": step, "eval_loss": 3.0 / step, "eval_exact_match": 0.5})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def write(tmp_path: Path, samples: list[ReportSample] | None = None, **options: object) -> Page:
    run = run_folder(tmp_path / "run")
    out = write_report(
        run,
        tmp_path / "deep" / "report.html",
        title=str(options.get("title", "A run")),
        samples=samples or [],
        facts=[("Exact match", "12.5 % → 99.0 %")],
    )
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    return Page(out.read_text(encoding="utf-8"))


def test_stands_alone(tmp_path: Path) -> None:
    page = write(tmp_path, [ReportSample(png(), "Which colour?", "red", "red", True)])
    whole = (tmp_path / "deep" / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"data:image/\w+;base64,[\w+/=]+", "", whole)
    assert text != whole
    assert not re.search(r"https?:|//\w|url\(|@import|<script|<link", text)
    assert all(str(image["src"]).startswith("data:image/") for image in page.all("img"))
    assert "12.5 % → 99.0 %" in page.words


def test_curves_have_a_point_for_each_line(tmp_path: Path) -> None:
    page = write(tmp_path)
    counts = [len(str(line["points"]).split()) for line in page.all("polyline")]
    assert counts == [40, 4, 40, 40, 40, 40, 40]
    for line in page.all("polyline"):
        for point in str(line["points"]).split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 560
            assert 0 <= y <= 300
    assert {"Loss", "Samples per second", "step"} <= {word.strip() for word in page.words}


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    page = write(tmp_path, [ReportSample(None, evil, "'\"&", evil, False)], title=evil)
    assert page.all("script") == []
    assert page.words.count(evil) == 4  # title, heading, question, prediction
    assert "'\"&" in page.words


def test_samples_say_whether_they_are_right(tmp_path: Path) -> None:
    samples = [ReportSample(png(), "q", "red", "red", True), ReportSample(png(), "q", "red", "", False)]
    page = write(tmp_path, samples)
    assert {"✓ right", "✗ wrong", "(nothing)", "1 of the 2 shown are right."} <= set(page.words)


def test_large_images_are_scaled_down(tmp_path: Path) -> None:
    page = write(tmp_path, [ReportSample(png(2000, 1000), "q", "a", "a", True)])
    data = base64.b64decode(str(page.all("img")[0]["src"]).split(",")[1])
    assert Image.open(io.BytesIO(data)).size == (480, 240)


def test_missing_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl") as caught:
        write_report(tmp_path, tmp_path / "out.html", title="t", samples=[], facts=[])
    assert str(tmp_path) in str(caught.value)
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("bad", ["{oops", "[1]"])
def test_bad_metrics_line_is_named(tmp_path: Path, bad: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 1.0}}\n{bad}\n{{"step": 2, "loss": 1.0}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        write_report(tmp_path, tmp_path / "out.html", title="t", samples=[], facts=[])


def test_broken_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="report sample 1"):
        write(tmp_path, [ReportSample(b"no image", "q", "a", "a", True)])


def test_odd_metrics_still_give_a_page(tmp_path: Path) -> None:
    lines = [
        '{"step": 5, "loss": 0.0}',
        '{"step": 6, "loss": NaN}',
        '{"step": 7, "note": "saved"}',
        "",
        '{"step": 8, "lo',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    out = write_report(tmp_path, tmp_path / "out.html", title="t", samples=[], facts=[])
    page = Page(out.read_text(encoding="utf-8"))
    assert [len(str(line["points"]).split()) for line in page.all("polyline")] == [1]
    assert len(page.all("circle")) == 1


def test_no_steps_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    out = write_report(tmp_path, tmp_path / "out.html", title="t", samples=[], facts=[])
    assert "No step was logged." in Page(out.read_text(encoding="utf-8")).words
