"""Experiments and stages as settings: how they are resolved, what is refused, which stage a verb means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from pipeline.config_file import dump_config, load_config
from pipeline.experiments import Stage, experiments_of, find_stage
from pipeline.time_calibrate import FOLDER

BASE: dict[str, Any] = {
    "model": "m",
    "data": {"splits": {"train": "a.jsonl", "val": "v.jsonl"}},
    "output_dir": "runs/x",
    "train": {"learning_rate": 1e-3, "lora": {"r": 8, "lora_alpha": 16}},
}
TWO: dict[str, Any] = {
    "plain": None,
    "staged": {
        "train": {"learning_rate": 5e-4, "lora": {"r": 4}},
        "eval": {"max_new_tokens": 9},
        "stages": {
            "one": {"data": {"splits": {"first": "first.jsonl"}}, "train": {"split": "first"}},
            "two": {"train": {"learning_rate": 1e-5, "order": "file"}},
            "three": {"train": {"adapter": None}},
        },
    },
}
# What verbs write into output_dir.
TAKEN = [
    *("times", "Times", "calibration.json", "time_calibration.json", "config.yaml", "run.json", "Metrics.jsonl"),
    *("comparison.md", "Comparison.csv", "comparison.svg", "train.log", "EVAL-val", "Cache-train.json"),
    *("adapter.old-1", "train.rejected.jsonl"),
]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """my.yaml: BASE with experiments."""

    def write(experiments: Any, **sections: Any) -> Path:
        file = tmp_path / "my.yaml"
        file.write_text(yaml.safe_dump({**BASE, **sections, "experiments": experiments}, sort_keys=False))
        return file

    return write


@pytest.fixture
def stages(write: Callable[..., Path]) -> dict[str, Stage]:
    """The stages of TWO by label."""
    return {stage.label: stage for e in experiments_of(load_config(write(TWO))) for stage in e.stages}


def test_a_file_without_experiments_is_one_stage_with_the_settings_themselves(write: Callable[..., Path]) -> None:
    settings = load_config(write({}))

    (experiment,) = experiments_of(settings)
    (stage,) = experiment.stages

    assert (experiment.name, stage.name, stage.label) == ("", "", "")
    assert stage.settings is settings


def test_names_order_and_folders(stages: dict[str, Stage]) -> None:
    assert [(label, str(stage.settings.output_dir)) for label, stage in stages.items()] == [
        ("plain", "runs/x/plain"),
        ("staged/one", "runs/x/staged/one"),
        ("staged/two", "runs/x/staged/two"),
        ("staged/three", "runs/x/staged/three"),
    ]


def test_a_stage_overrides_its_experiment_which_overrides_the_file(stages: dict[str, Stage]) -> None:
    one, two = stages["staged/one"].settings, stages["staged/two"].settings

    assert (one.train.learning_rate, two.train.learning_rate) == (5e-4, 1e-5)
    assert (one.train.split, two.train.split) == ("first", "train")
    assert (one.train.lora.r, one.train.lora.lora_alpha) == (4, 16)  # sections are merged, not replaced
    assert (two.train.order, two.eval.max_new_tokens) == ("file", 9)
    assert stages["plain"].settings.train.lora.r == 8
    assert all(not stage.settings.experiments for stage in stages.values())


def test_a_stage_starts_from_the_one_before_unless_it_says_otherwise(stages: dict[str, Stage]) -> None:
    assert {label: stage.settings.train.adapter for label, stage in stages.items()} == {
        "plain": None,
        "staged/one": None,
        "staged/two": Path("runs/x/staged/one/adapter"),
        "staged/three": None,
    }


def test_all_read_the_cache_of_the_file(stages: dict[str, Stage], write: Callable[..., Path]) -> None:
    assert {stage.settings.cache_source for stage in stages.values()} == {Path("runs/x/features")}

    named = load_config(write(TWO, cache={"dir": "http://host/features"}))
    sources = {stage.settings.cache_source for e in experiments_of(named) for stage in e.stages}
    assert sources == {"http://host/features"}


def test_a_split_of_a_stage_is_one_of_the_file(write: Callable[..., Path]) -> None:
    settings = load_config(write(TWO))

    assert list(settings.data.splits) == ["train", "val", "first"]
    assert settings.data.splits["first"].path == "first.jsonl"


def test_what_was_not_given_stays_so(stages: dict[str, Stage]) -> None:
    # train.eval_split is passed over when data.splits lacks it, but only where nobody asked for it.
    assert "eval_split" not in stages["staged/two"].settings.train.model_fields_set


def test_dumping_and_loading_gives_the_same_experiments(write: Callable[..., Path], tmp_path: Path) -> None:
    settings = load_config(write(TWO))
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(settings))

    assert load_config(again) == settings
    assert [e.name for e in experiments_of(load_config(again))] == ["plain", "staged"]


def test_overrides_of_the_command_line_reach_into_stages(write: Callable[..., Path]) -> None:
    options = ["experiments.staged.stages.two.train.learning_rate=7", "train.lora.lora_alpha=5"]
    stages = experiments_of(load_config(write(TWO), options))[1].stages

    assert [stage.settings.train.learning_rate for stage in stages] == [5e-4, 7, 5e-4]
    assert {stage.settings.train.lora.lora_alpha for stage in stages} == {5}


@pytest.mark.parametrize(
    ("experiments", "message"),
    [
        ({"a": {"train": {"lr": 1}}}, "experiments.a.train.lr: there is no such setting; nearest: train.learning_rate"),
        (
            {"a": {"stages": {"s": {"train": {"lora": {"rank": 3}}}}}},
            "experiments.a.stages.s.train.lora.rank: there is no such setting; nearest: train.lora.r",
        ),
        (
            {"a": {"train": {"seed": -1}, "stages": {"s": None}}},
            "experiments.a.train.seed: must be at least 0 (it is -1)",
        ),
        ({"a": {"trian": {}}}, "experiments.a.trian: there is no such setting; nearest: experiments.a.train"),
        ({"a": {"cache": {}}}, "experiments.a.cache: there is no such setting; nearest: cache"),
        ({"a": {"stages": {"s": {"stages": {}}}}}, "experiments.a.stages.s.stages: there is no such setting"),
        ({"a": 5}, "experiments.a: must be a section (keys and values) (it is 5)"),
        ([1], "experiments: must be a section (keys and values)"),
        ({"a": {"train": 3}}, "experiments.a.train: must be a section (keys and values) (it is 3)"),
        ({"a": {"stages": {"s": {"data": []}}}}, "experiments.a.stages.s.data: must be a section"),
        (
            {"a": {"data": {"image_root": "q"}}},
            "experiments.a.data: cannot change image_root, since all read one cache",
        ),
        (
            {"a": {"data": {"splits": {"train": "b.jsonl"}}}},
            "experiments.a.data.splits.train is 'b.jsonl', and elsewhere train is 'a.jsonl'",
        ),
        (
            {"a": {"train": {"load_best_model_at_end": True, "eval_steps": 3}}},
            "experiments.a.train: load_best_model_at_end needs save_steps (None) to be a multiple of eval_steps (3)",
        ),
        ({"a b": None}, "the experiment name 'a b' may hold letters, digits"),
        ({"../up": None}, "the experiment name '../up' may hold"),
        ({"a": {"stages": {"x/y": None}}}, "the stage name 'x/y' may hold"),
        ({"-a": None}, "the experiment name '-a' may hold"),
        ({"a.": None}, "the experiment name 'a.' may hold"),
        ({"x" * 65: None}, "may hold letters, digits"),
        ({"features": None}, "the experiment name 'features' is that of another file or folder in output_dir"),
        ({"checkpoint-3": None}, "the experiment name 'checkpoint-3' is that of another"),
        *(({name: None}, f"the experiment name {name!r} is that of another") for name in TAKEN),
        ({FOLDER: None}, f"the experiment name {FOLDER!r} may hold"),
        ({"A": None, "a": None}, "the experiment names 'A' and 'a' differ by case only"),
    ],
)
def test_what_is_wrong_is_told_where_it_stands(write: Callable[..., Path], experiments: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(write(experiments))

    assert message in str(refused.value)
    assert refused.value.where is not None
    assert refused.value.where.endswith("my.yaml")
    assert refused.value.do


def test_one_name_for_the_same_file_may_stand_in_several_places(write: Callable[..., Path]) -> None:
    splits = {"data": {"splits": {"extra": {"path": "e.jsonl"}, "train": {"path": "a.jsonl"}}}}

    settings = load_config(write({"a": splits, "b": {"stages": {"s": {"data": {"splits": {"extra": "e.jsonl"}}}}}}))

    assert list(settings.data.splits) == ["train", "val", "extra"]


@pytest.mark.parametrize(
    ("names", "last", "label"),
    [
        (("plain", None), False, "plain"),
        (("staged", "two"), False, "staged/two"),
        (("staged", None), True, "staged/three"),
    ],
)
def test_the_stage_that_a_verb_means(
    write: Callable[..., Path], names: tuple[str, str | None], last: bool, label: str
) -> None:
    assert find_stage(load_config(write(TWO)), *names, last=last).label == label


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train"],
            "--experiment is missing: the file holds experiments\n  What to do: give --experiment with one of: plain",
        ),
        (["eval"], "give --experiment with one of: plain, staged"),
        (["merge", "--output", "x"], "give --experiment with one of: plain, staged"),
        (["predict", "--prompt", "x"], "give --experiment with one of: plain, staged"),
        (["train", "--experiment", "palin"], "--experiment palin: there is none of that name"),
        (["train", "--experiment", "staged"], "give --stage with one of: one, two, three"),
        (["train", "--experiment", "staged", "--stage", "four"], "--stage four: there is none of that name"),
        (["eval", "--experiment", "plain", "--stage", "one"], "--stage one: the experiment plain has no stages"),
        (["experiments", "--experiment", "palin"], "--experiment palin: there is none of that name"),
    ],
)
def test_a_verb_names_the_experiments_where_it_needs_one(
    run: Callable[..., Any], write: Callable[..., Path], arguments: list[str], message: str
) -> None:
    run(*arguments, "--config", write(TWO)).check_refusal(2, message)


def test_a_file_without_experiments_takes_no_names(run: Callable[..., Any], write: Callable[..., Path]) -> None:
    result = run("train", "--config", write({}), "--experiment", "a")

    result.check_refusal(2, "--experiment and --stage go with a file that has experiments")
