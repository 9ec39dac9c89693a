"""What of a chain is submitted when some of it is finished, queued, or waits in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.errors import ConfigError
from pipeline.chain import Done, PlannedJob, plan_jobs, splits_of
from pipeline.chain_queue import Queued, to_submit
from pipeline.config import PipelineConfig
from slurm.sbatch import render

NOTHING = Done({"train": (0, 1, 2, 3), "val": (0, 1, 2, 3)}, frozenset(), frozenset(), comparison=False)
STAGES = {"a": {"stages": {"first": {}, "second": {}}}, "b": {}}


def _config(**sections: Any) -> PipelineConfig:
    plain = {"model": "m", "data": {"splits": {"train": "t.jsonl", "val": "v.jsonl"}}, "output_dir": "run"}
    return PipelineConfig.model_validate({**plain, **sections})


def _plan(config: PipelineConfig, done: Done) -> list[PlannedJob]:
    return plan_jobs(config, Path("/run/slurm/config.yaml"), done)


def _names(jobs: list[PlannedJob]) -> list[str]:
    return [job.name for job in jobs]


def test_all_of_it() -> None:
    assert _names(_plan(_config(), NOTHING)) == ["cache-train", "cache-val", "check", "train", "eval"]


def test_what_is_finished_is_left_out() -> None:
    assert _names(_plan(_config(), Done({}, frozenset(), frozenset(), comparison=False))) == ["train", "eval"]
    assert _names(_plan(_config(), Done({}, frozenset({""}), frozenset(), comparison=False))) == ["eval"]
    assert _plan(_config(), Done({}, frozenset({""}), frozenset({""}), comparison=False)) == []


def test_a_stage_behind_one_that_is_made_anew_is_made_anew() -> None:
    done = Done({}, frozenset({"a/second", "b"}), frozenset({"a", "b"}), comparison=True)
    planned = _plan(_config(experiments=STAGES), done)
    assert _names(planned) == ["train-a+first", "train-a+second", "eval-a", "compare"]
    assert planned[-1].chained.after_any == ("eval-a", "eval-b")


def test_no_two_jobs_have_one_name() -> None:
    experiments = {"a": {"stages": {"b-c": {}}}, "a-b": {"stages": {"c": {}}}, "a-b-c": {}}
    names = _names(_plan(_config(experiments=experiments), NOTHING))
    assert len(names) == len(set(names))


def test_splits_of_any_letters_have_jobs_whose_names_slurm_takes() -> None:
    splits = {"prüfung": "t.jsonl", "prfung-4ya": "u.jsonl", "val": "v.jsonl", "試験": "w.jsonl"}
    experiments = {name: {"train": {"split": split}} for name, split in zip("abc", splits, strict=False)}
    config = _config(data={"splits": splits}, experiments=experiments, train={"eval_split": "試験"})
    planned = _plan(config, replace(NOTHING, missing_parts=dict.fromkeys(splits, (0,))))

    assert len(set(_names(planned))) == len(planned)
    places = {"logs": Path("/logs"), "workdir": Path("/work"), "path": Path("/bin")}
    texts = [render(job.chained.script, config.slurm, **places) for job in planned]
    assert "--job-name=cache-prfung-4ya+\n" in texts[0]
    assert "--split 'prüfung'" in texts[0]
    assert "--job-name=cache-prfung-4ya\n" in texts[1]


def test_only_parts_that_are_not_queued_are_submitted_and_those_behind_them_anew() -> None:
    planned = _plan(_config(), NOTHING)
    # Part 2 of train has failed while the others run: everything behind it waits in vain.
    queued = {
        "cache-train": Queued(("1_[0-1,3]",), waiting=False),
        "cache-val": Queued(("2_[0-3]",), waiting=False),
        "check": Queued(("3",)),
        "train": Queued(("4",)),
    }
    new, cancel = to_submit(planned, queued)
    assert _names(new) == ["cache-train", "check", "train", "eval"]
    assert new[0].chained.script.tasks == (2,)
    assert cancel == ["check", "train"]


def test_what_is_queued_or_running_is_not_submitted_twice() -> None:
    planned = _plan(_config(), NOTHING)
    queued = {
        "cache-train": Queued(("1_[0-3]",), waiting=False),
        "cache-val": Queued(("2_[0-1]", "6_[2-3]")),
        "check": Queued(("3",)),
        "train": Queued(("4",)),
        "eval": Queued(("5",)),
    }
    assert to_submit(planned, queued) == ([], [])
    # A job that runs is never cancelled for one before it.
    running = {"train": Queued(("4",), waiting=False)}
    new, cancel = to_submit(planned, running)
    assert _names(new) == ["cache-train", "cache-val", "check", "eval"]
    assert cancel == []


def test_splits_that_share_images_are_cached_one_after_another() -> None:
    splits = {"train": "t.jsonl", "more": "m.jsonl", "val": "v.jsonl"}
    config = _config(data={"splits": splits}, experiments={"a": {}, "b": {"train": {"split": "more"}}})
    done = Done(dict.fromkeys(splits, (0, 1)), frozenset(), frozenset(), comparison=False)
    planned = plan_jobs(config, Path("/run/slurm/config.yaml"), done, {"more": ("train",), "val": ("more",)})

    new, _ = to_submit(planned, {})
    after = {job.name: job.chained.after_any for job in new}
    assert [after[f"cache-{split}"] for split in splits] == [(), ("cache-train",), ("cache-more",)]
    assert new[3].chained.after_ok == ("cache-train", "cache-more", "cache-val")

    # A part of the first that is done again waits for what has begun of the next meanwhile, and the last for both.
    queued = {
        "cache-train": Queued(("1_1",), waiting=False),
        "cache-more": Queued(("2_[0-1]",), waiting=False),
        "check": Queued(("4",)),
    }
    new, cancel = to_submit(planned, queued)
    assert [(job.name, job.chained.after_any) for job in new[:2]] == [
        ("cache-train", ("cache-more",)),
        ("cache-val", ("cache-more",)),
    ]
    assert new[0].chained.script.tasks == (0,)
    assert cancel == ["check"]


def test_the_splits_that_are_cached() -> None:
    splits = {"train": "t.jsonl", "easy": "e.jsonl", "val": "v.jsonl", "unused": "u.jsonl"}
    experiments = {"a": {"stages": {"first": {"train": {"split": "easy"}}, "second": {}}}}
    assert splits_of(_config(data={"splits": splits}, experiments=experiments)) == ["easy", "train", "val"]
    without = _config(data={"splits": {"train": "t.jsonl"}})
    assert splits_of(without) == ["train"]
    assert _names(_plan(without, Done({}, frozenset(), frozenset(), comparison=False))) == ["train"]


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ({"cache": {"gpus": 2}}, "slurm.cache.gpus is 2, but a task of the cache array uses one"),
        (
            {"experiments": "allocation", "train": {"nodes": 2}},
            "slurm.experiments: allocation with slurm.train.nodes 2",
        ),
    ],
)
def test_settings_that_contradict_each_other(slurm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _plan(_config(experiments=STAGES, slurm=slurm), NOTHING)


def test_an_allocation_needs_a_split_to_evaluate() -> None:
    config = _config(data={"splits": {"train": "t.jsonl"}}, experiments=STAGES, slurm={"experiments": "allocation"})
    with pytest.raises(ConfigError, match="there is no split to do it on"):
        _plan(config, NOTHING)
