"""The comparison table from run folders: its numbers, what is missing, its three files."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.errors import DataError
from pipeline.comparison import as_csv, markdown, metrics_of, row_of, write_comparison
from pipeline.comparison_picture import draw
from pipeline.comparison_row import Row
from pipeline.config import PipelineConfig
from pipeline.evaluations import evaluation_folder, made_from
from pipeline.experiments import Experiment, Stage, experiments_of
from pipeline.options import job_of

METRICS = ["val loss", "val exact_match", "final train loss", "steps", "training time (s)", "samples/s"]


@pytest.fixture
def settings(make_config: Callable[..., PipelineConfig], data_dir: Path) -> PipelineConfig:
    """Two experiments, the second of two stages."""
    splits = {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}
    return make_config(splits, experiments={"plain": None, "two": {"stages": {"first": None, "second": None}}})


def _train(stage: Stage, losses: list[float], *, finished: bool = True) -> None:
    """What a run leaves: 4 samples a step, half a second each step."""
    folder = stage.settings.output_dir
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(stage.label.encode())
    lines = [
        {"step": step, "loss": loss, "seconds": 0.5, "samples_per_second": 8.0} for step, loss in enumerate(losses, 1)
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": len(losses), "eval_loss": 9.0}])
    (folder / "metrics.jsonl").write_text(text)
    job = job_of(stage.settings, from_cache=True)
    content = {"settings": job.settings(), "finished": job.length() if finished else None}
    (folder / "run.json").write_text(json.dumps(content))


def _evaluate(stage: Stage, **scores: float) -> None:
    folder = evaluation_folder(stage.settings, "val")
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(scores))
    origin = made_from(stage.settings, "val", stage.settings.output_dir / "adapter")
    (folder / "made_from.json").write_text(json.dumps(origin))


@pytest.fixture
def finished(settings: PipelineConfig) -> tuple[Experiment, ...]:
    """All trained and evaluated."""
    plain, two = experiments_of(settings)
    _train(plain.stages[0], [3.0, 2.0])
    _train(two.stages[0], [4.0, 3.5])
    _train(two.stages[1], [1.5, 1.25, 1.125])
    _evaluate(plain.stages[0], loss=2.5, exact_match=0.25)
    _evaluate(two.stages[1], loss=1.5, exact_match=0.5)
    return plain, two


def test_scores_are_the_last_stages_and_costs_those_of_all(finished: tuple[Experiment, ...]) -> None:
    row = row_of(finished[1], ["val"])

    assert row.values == {
        "val loss": 1.5,
        "val exact_match": 0.5,
        "final train loss": 1.125,
        "steps": 5.0,
        "training time (s)": 2.5,
        "samples/s": 8.0,
    }
    assert row.losses == [(1, 4.0), (2, 3.5), (3, 1.5), (4, 1.25), (5, 1.125)]
    assert row.missing == ()


def test_the_three_files(finished: tuple[Experiment, ...], tmp_path: Path) -> None:
    said = write_comparison(tmp_path, finished, ["val"])

    lines = (tmp_path / "comparison.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert table[0] == ["experiment", "stages", *METRICS]
    assert table[2] == ["plain", "-", "2.5000", "0.2500", "2.0000", "2", "1.0", "8.00"]
    assert table[3] == ["two", "first > second", "1.5000", "0.5000", "1.1250", "5", "2.5", "8.00"]
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["experiment"], float(row["val loss"]), row["missing"] + row["so far"]) for row in rows] == [
        ("plain", 2.5, ""),
        ("two", 1.5, ""),
    ]
    assert "so far" not in said
    picture = ET.fromstring((tmp_path / "comparison.svg").read_text())
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [metric in words for metric in METRICS] == [True] * len(METRICS)
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 2
    assert "\n".join(lines[2:]).strip() in said


def test_what_is_missing_is_said(settings: PipelineConfig, tmp_path: Path) -> None:
    plain, two = experiments_of(settings)
    _train(plain.stages[0], [3.0, 2.0], finished=False)
    _train(two.stages[0], [4.0])

    said = write_comparison(tmp_path, (plain, two), ["val"])

    assert said.split("Missing:\n\n")[1].splitlines()[:4] == [
        "- plain: training is not finished (at step 2)",
        "- plain: val is not evaluated",
        "- two: second is not finished",
        "- two: val is not evaluated",
    ]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in said.splitlines()[2:4]]
    assert cells == [
        ["plain", "-", "missing", "2.0000 so far", "2 so far", "1.0 so far", "8.00 so far"],
        ["two", "first > second", "missing", "missing", "1 so far", "0.5 so far", "8.00 so far"],
    ]
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [(row["val loss"], row["final train loss"]) for row in rows] == [("", "2.0"), ("", "")]
    assert rows[1]["so far"] == "steps; training time (s); samples/s"
    assert ">0.5 so far<" in (tmp_path / "comparison.svg").read_text()
    assert rows[1]["missing"] == "second is not finished; val is not evaluated"
    assert ">missing<" in (tmp_path / "comparison.svg").read_text()


def test_nothing_at_all_gives_a_table_of_what_is_missing(settings: PipelineConfig, tmp_path: Path) -> None:
    said = write_comparison(tmp_path / "new", experiments_of(settings), ["val"])

    assert said.count(" missing ") == 10
    ET.fromstring((tmp_path / "new" / "comparison.svg").read_text())


def test_an_evaluation_of_another_adapter_does_not_count(finished: tuple[Experiment, ...]) -> None:
    stage = finished[0].stages[0]
    (stage.settings.output_dir / "adapter" / "adapter_model.safetensors").write_bytes(b"trained again")

    row = row_of(finished[0], ["val"])

    assert "val loss" not in row.values
    assert row.missing == ("val is not evaluated: the evaluation there is of another adapter, or with other settings",)


def test_a_score_that_only_others_have_is_said(settings: PipelineConfig, tmp_path: Path) -> None:
    plain, two = experiments_of(settings)
    for stage in (plain.stages[0], *two.stages):
        _train(stage, [1.0])
    _evaluate(plain.stages[0], loss=2.5, loss_observe=1.0)
    _evaluate(two.stages[1], loss=1.5)

    said = write_comparison(tmp_path, (plain, two), ["val"])

    assert said.split("Missing:\n\n")[1].splitlines()[0] == "- two: its evaluation has no val loss_observe"


def test_a_number_that_is_none_is_missing(finished: tuple[Experiment, ...]) -> None:
    file = finished[0].stages[0].settings.output_dir / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 2.0', '"loss": NaN'))

    row = row_of(finished[0], ["val"])

    assert "final train loss" not in row.values
    assert row.missing == ("final train loss is nan",)


def test_a_line_that_is_still_being_written_is_left_out_and_a_damaged_one_refused(
    finished: tuple[Experiment, ...],
) -> None:
    file = finished[0].stages[0].settings.output_dir / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 3, "lo')
    assert row_of(finished[0], ["val"]).values["steps"] == 2

    file.write_text('{"step"\n' + whole)
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: is damaged") as refused:
        row_of(finished[0], ["val"])
    assert refused.value.do


def test_columns_are_those_of_all_rows() -> None:
    rows = [
        Row("a", ("",), {"val loss": 1.0, "val loss_observe": 2.0}, [], ()),
        Row("b", ("",), {"val loss": 1.5, "val point_accuracy": 0.5}, [], ("x",)),
    ]

    metrics = metrics_of(rows, ["val"])

    assert metrics[:3] == ["val loss", "val loss_observe", "val point_accuracy"]
    assert "| a          | -      |   1.0000 |           2.0000 |            missing |" in markdown(rows, metrics)
    assert as_csv(rows, metrics).splitlines()[2].startswith("b,,1.5,,0.5,")


def test_no_name_of_a_stage_of_answers_breaks_the_table() -> None:
    metric = "val loss_a|b\\|c\nd"
    row = Row("x", ("",), {metric: 1.0}, [], (f"its evaluation has no {metric}",))

    lines = markdown([row], metrics_of([row], [])).splitlines()

    assert len(lines) == 3 + 4
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in lines[:3]] == [8, 8, 8]
    assert r"val loss_a\|b\\\|c d" in lines[0]
    assert lines[-1] == r"- x: its evaluation has no val loss_a\|b\\\|c d"


@pytest.mark.parametrize("name", ["<b>", 'a "quote"', "a|b", "x" * 64])
def test_no_name_breaks_the_picture(name: str) -> None:
    row = Row(name, ("",), {"val loss": -0.5}, [(1, 2.0)], ())

    ET.fromstring(draw([row], ["val loss"]))


def test_a_long_curve_is_thinned(tmp_path: Path) -> None:
    row = Row("a", ("",), {}, [(float(step), 1.0) for step in range(1, 10_001)], ())

    (line,) = ET.fromstring(draw([row], [])).iter("{http://www.w3.org/2000/svg}polyline")

    points: list[Any] = str(line.get("points")).split()
    assert 300 < len(points) <= 400
