"""The best metric: known before training whether evaluations give it; loss and answers are of the same records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.errors import ConfigError
from cache.progress import Silent
from cache.records import Record, Text, Turn
from pipeline.config import PipelineConfig
from train.best_metric import greater_is_better, needs_answers, require_given
from train.config import TrainConfig
from train.held_out import HeldOut
from train.inputs import Inputs

from .conftest import Run, job_of

SETTINGS = {"effective_batch_size": 10, "max_steps": 1, "eval_split": "val"}


def _record(*answer: Text) -> Record:
    return Record("1", "file:1", (Turn("user", (Text("Where?"),)), Turn("assistant", answer)), ())


POINT, WORD = _record(Text("(12, 30)")), _record(Text("blue"))
STAGED = _record(Text("I see", stage="observe"), Text("well", weight=0.0, stage="muted"), Text("so", stage="answer"))


def test_the_direction_follows_from_the_name() -> None:
    assert [greater_is_better(name) for name in ("loss", "loss_answer", "exact_match")] == [False, False, True]
    assert [needs_answers(name) for name in ("loss", "loss_answer", "token_f1")] == [False, False, True]


@pytest.mark.parametrize("name", ["accuracy", "eval_loss", "loss_", ""])
def test_an_unknown_metric_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="must be loss, loss_<stage>, exact_match, token_f1 or point_accuracy"):
        TrainConfig(metric_for_best_model=name)


def test_what_the_records_give_passes() -> None:
    for metric in ("loss", "exact_match", "token_f1"):
        require_given(metric, "val", [WORD])
    require_given("point_accuracy", "val", [WORD, POINT])
    require_given("loss_answer", "val", [WORD, STAGED])


@pytest.mark.parametrize(
    ("metric", "records", "message"),
    [
        ("point_accuracy", [WORD], "needs answers that are points, and none of the 1 records"),
        ("loss_reason", [STAGED], "has no such stage; there are: loss_observe, loss_answer"),
        ("loss_muted", [STAGED], "there are: loss_observe, loss_answer"),
        ("loss_answer", [WORD], "there are: none, its answers have no stages"),
    ],
)
def test_what_the_records_do_not_give_is_refused(metric: str, records: list[Record], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_given(metric, "val", records)

    assert message in refused.value.what
    assert f"train.metric_for_best_model: {metric}" in refused.value.what


def test_it_is_refused_before_the_model_is_loaded(
    run_cached: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("no model is loaded")

    monkeypatch.setattr("train.run.load_language_model", refuse)

    with pytest.raises(ConfigError, match=r"train\.metric_for_best_model: loss_answer: the evaluation split 'val' has"):
        run_cached("run", **SETTINGS, metric_for_best_model="loss_answer")


def test_a_stages_loss_chooses_the_checkpoint(
    make_config: Callable[..., PipelineConfig], data_dir: Path, tmp_path: Path
) -> None:
    from train.run import run_training

    stages = str(data_dir / "stages.jsonl")
    train = {**SETTINGS, "max_steps": 2, "save_steps": 1, "eval_steps": 1, "load_best_model_at_end": True}
    config = make_config({"train": stages, "val": stages}, train={**train, "metric_for_best_model": "loss_answer"})
    run_training(job_of(config, from_cache=False), Silent())

    lines = Run(config.output_dir).lines()
    best = min(line["eval_loss_answer"] for line in lines if "eval_loss" in line)
    state = json.loads((config.output_dir / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_metric"] == pytest.approx(best)


def test_loss_and_answers_are_of_the_same_records(
    make_config: Callable[..., PipelineConfig], data_dir: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (data_dir / "val.jsonl").read_text().splitlines()]
    for row in rows:
        row["image"] = str(data_dir / row["image"])
    assert len(rows) >= 4
    rows[1]["answer"] = "very " * 2000  # too long with its answer, and not without
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"splits": {"val": {"path": str(file), "image_root": "/"}}, "max_length": 1000, "on_bad_record": "report"}
    config = make_config({}, data={**data, "max_bad_share": 1.0})
    inputs = Inputs.open(job_of(config, from_cache=False))

    held_out = HeldOut.read(inputs, "val", Silent(), answers=True, limit=3)

    measured, prompts = ([record.source for record in part.records] for part in (held_out.measured, held_out.prompts))
    assert measured == prompts == [f"{file}:{line}" for line in (1, 3, 4)]
    assert [sample.source for sample in held_out.measured.samples] == measured
    assert [rejection.source for rejection in held_out.measured.rejected] == [f"{file}:2"]
    whole = HeldOut.read(inputs, "val", Silent(), answers=False, limit=3)
    assert len(whole.measured.samples) == len(rows) - 1
