"""The `experiments:` section: what each experiment and stage changes of the settings around it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from cache.config import Section

Overrides = dict[str, Any]
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_-])?")
# What stands beside the experiments in output_dir, in small letters: some disks do not tell them apart.
_TAKEN = {"adapter", "features", "jobs", "log", "logs", "runs", "scripts", "slurm", "times"}
_TAKEN |= {"calibration.json", "config.yaml", "metrics.jsonl", "run.json", "time_calibration.json", "train.log"}
_TAKEN_BEGINNINGS = ("adapter.", "cache-", "checkpoint-", "comparison.", "eval-")
_TAKEN_ENDS = (".rejected.jsonl",)


class StageConfig(Section):
    """One training run. It starts from the adapter of the stage before, unless it sets `train.adapter` itself."""

    data: Overrides = Field(default={})
    """What it changes of `data`. A split that only it reads may be added here; the name of a split stands for the same
    files everywhere in the file. `data.image_root` cannot be changed: give the split its own `image_root`."""
    train: Overrides = Field(default={})
    """What it changes of `train`."""
    eval: Overrides = Field(default={})
    """What it changes of `eval`."""

    @field_validator("data", "train", "eval", mode="before")
    @classmethod
    def _empty_section(cls, value: object) -> object:
        return {} if value is None else value

    @field_validator("data")
    @classmethod
    def _same_images(cls, value: Overrides) -> Overrides:
        if "image_root" in value:
            raise ValueError("cannot change image_root, since all read one cache; give the split its own image_root")
        return value


class ExperimentConfig(StageConfig):
    """Stages that follow one another. What it changes of `data`, `train` and `eval` holds for all its stages."""

    stages: dict[str, StageConfig] = Field(default={})
    """The stages in order, each with what it changes. Without stages it is one run in
    `<output_dir>/<experiment>`; else each has `<output_dir>/<experiment>/<stage>`."""

    @field_validator("stages", mode="before")
    @classmethod
    def _empty_stages(cls, value: object) -> object:
        return without_empty(value)

    @field_validator("stages")
    @classmethod
    def _stage_names(cls, value: dict[str, StageConfig]) -> dict[str, StageConfig]:
        check_names("stage", value)
        return value


def without_empty(value: object) -> object:
    """A section with nothing below it is null in YAML; it means that nothing is changed."""
    if isinstance(value, dict):
        return {name: {} if section is None else section for name, section in value.items()}
    return {} if value is None else value


def check_names(kind: str, named: dict[str, Any]) -> None:
    """Names become folders.

    Raises:
        ValueError: one cannot be a folder's name, is taken, or differs from another by case only.
    """
    seen: dict[str, str] = {}
    for name in named:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"the {kind} name {name!r} may hold letters, digits, -, _ and . only, begin with a letter or digit and "
                "be 64 long at most (it becomes a folder)"
            )
        if _is_taken(name.lower()):
            raise ValueError(f"the {kind} name {name!r} is that of another file or folder in output_dir")
        if name.lower() in seen:
            raise ValueError(f"the {kind} names {seen[name.lower()]!r} and {name!r} differ by case only")
        seen[name.lower()] = name


def _is_taken(name: str) -> bool:
    return name in _TAKEN or name.startswith(_TAKEN_BEGINNINGS) or name.endswith(_TAKEN_ENDS)


def with_stage_splits(raw: dict[str, Any]) -> dict[str, Any]:
    """The settings as written, with the splits that experiments and stages add listed in `data.splits` too.

    So every verb finds them, `pipeline cache --split NAME` first of all.

    Raises:
        ValueError: one name stands for different files.
    """
    data = raw.get("data")
    if not isinstance(data, dict) or not isinstance(splits := data.get("splits"), dict):
        return raw
    found = dict(splits)
    for place, added in _added_splits(raw.get("experiments")):
        for name, split in added.items():
            if _written_out(found.setdefault(name, split)) != _written_out(split):
                raise ValueError(
                    f"{place}.data.splits.{name} is {split!r}, and elsewhere {name} is {found[name]!r}; all read one "
                    "cache, so give the split another name and set train.split or train.eval_split to it"
                )
    return {**raw, "data": {**data, "splits": found}}


def _added_splits(experiments: object) -> list[tuple[str, dict[str, Any]]]:
    """(dotted place, splits) of each experiment and stage; what is malformed is left for validation to name."""
    found = []
    for name, experiment in _items(experiments):
        sections = [(f"experiments.{name}", experiment)]
        sections += [(f"experiments.{name}.stages.{stage}", one) for stage, one in _items(experiment.get("stages"))]
        for place, section in sections:
            data = section.get("data")
            if isinstance(data, dict) and isinstance(data.get("splits"), dict):
                found.append((place, data["splits"]))
    return found


def _items(sections: object) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(sections, dict):
        return []
    return [(str(name), section) for name, section in sections.items() if isinstance(section, dict)]


def _written_out(split: object) -> object:
    given = {"path": split} if isinstance(split, str) else split
    return {key: str(value) for key, value in given.items() if value is not None} if isinstance(given, dict) else given
