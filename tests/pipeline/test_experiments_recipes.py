"""The shipped recipes: placeholders filled with the sample data, every run for a couple of steps."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.chain import Done, plan_jobs
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.experiments import Experiment, experiments_of
from slurm.sbatch import render

RECIPES = sorted((Path(pipeline.__file__).parent / "recipes").glob("*.yaml"))
SMALL = {
    "cache.max_pixels": 128 * 128,
    "cache.dtype": "float32",
    "cache.num_workers": 0,
    "train.precision": "fp32",
    "train.max_steps": 2,
    "train.dataloader_num_workers": 0,
    "train.report_to": "[none]",
    "eval.limit": 2,
    "eval.max_new_tokens": 4,
}


@pytest.fixture
def filled(tmp_path: Path, data_dir: Path, tiny: Path) -> Callable[[Path], tuple[Path, list[str]]]:
    """A recipe's file with its placeholders filled, and the options that make it small."""

    def fill(recipe: Path) -> tuple[Path, list[str]]:
        data = tmp_path / "data"
        shutil.copytree(data_dir / "images", data / "images" / "images")
        text = recipe.read_text().replace("/path/to", str(tmp_path))
        assert "/path/to" in recipe.read_text()
        file = tmp_path / recipe.name
        file.write_text(text.replace("Qwen/Qwen3-VL-8B-Instruct", str(tiny)))
        for split in load_config(file).data.splits.values():
            staged = "chains" in split.path
            rows = data_dir / ("stages.jsonl" if staged else "val.jsonl" if "val" in split.path else "train.jsonl")
            shutil.copy(rows, split.path)
        return file, [f"--set={key}={value}" for key, value in SMALL.items()]

    return fill


def test_there_are_recipes_for_notes_b_c_and_d() -> None:
    assert [recipe.stem for recipe in RECIPES] == ["clicks", "endoscopy_stages", "five_experiments"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_caches_trains_evaluates_and_compares(
    run: Callable[..., Any], filled: Callable[[Path], tuple[Path, list[str]]], recipe: Path
) -> None:
    file, options = filled(recipe)
    settings = load_config(file, [option.removeprefix("--set=") for option in options])

    def succeed(*arguments: object) -> None:
        result = run(*arguments, "--config", file, *options)
        assert result.code == 0, result.err

    for split in settings.data.splits:
        succeed("cache", "--split", split)
    for experiment in experiments_of(settings):
        for stage in experiment.stages:
            names = [f"--experiment={stage.experiment}"] if stage.experiment else []
            succeed("train", "--from-cache", *names, *([f"--stage={stage.name}"] if stage.name else []))
        succeed("eval", *([f"--experiment={experiment.name}"] if experiment.name else []))
    succeed("compare")

    table = (settings.output_dir / "comparison.md").read_text()
    assert "issing" not in table
    for experiment in experiments_of(settings):
        run_file = json.loads((experiment.stages[-1].settings.output_dir / "run.json").read_text())
        assert run_file["finished"]["max_steps"] == 2
        assert ("train.adapter" in run_file["settings"]) == (len(experiment.stages) > 1)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_jobs_of_a_recipe_leave_nothing_to_the_defaults_of_a_cluster(recipe: Path) -> None:
    settings = load_config(recipe)
    everything = Done(dict.fromkeys(settings.data.splits, (0,)), frozenset(), frozenset(), comparison=False)
    places = {"logs": Path("/logs"), "workdir": Path("/work"), "path": Path("/bin")}

    for job in plan_jobs(settings, Path("/config.yaml"), everything):
        text = render(job.chained.script, settings.slurm, **places)
        asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.M))
        assert {"cpus-per-task", "mem", "time"} <= asked.keys(), job.name
        # Jobs for one GPU take no more of a node than their share, and those without a GPU little.
        gpus = int(asked.get("gres", "gpu:0").rpartition(":")[2])
        assert int(asked["cpus-per-task"]) <= max(2, 8 * gpus)
        assert int(asked["mem"].removesuffix("G")) <= max(16, 64 * gpus)


def _five() -> tuple[PipelineConfig, dict[str, Experiment]]:
    settings = load_config(next(recipe for recipe in RECIPES if recipe.stem == "five_experiments"))
    return settings, {experiment.name: experiment for experiment in experiments_of(settings)}


def test_the_five_are_those_of_note_b() -> None:
    settings, five = _five()

    assert {name: len(experiment.stages) for name, experiment in five.items()} == {
        "random_order": 1,
        "reordered": 1,
        "three_stages": 3,
        "curriculum": 2,
        "chain_of_thought": 1,
    }
    stages = [stage.settings for experiment in five.values() for stage in experiment.stages]
    assert {stage.train.effective_batch_size for stage in stages} == {16}
    assert {(stage.train.save_steps, stage.train.save_total_limit) for stage in stages} == {(None, 3)}
    assert {stage.cache_source for stage in stages} == {settings.cache_source}
    assert five["random_order"].stages[0].settings.train.order == "sample"
    assert five["reordered"].stages[0].settings.train.order == "file"
