"""One YAML file, overrides on the command line, unknown keys refused with the nearest valid ones."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from cache.config import CacheConfig, DataConfig, ModelConfig, Section
from cache.errors import ConfigError
from train.config import EvalConfig, TrainConfig


class PipelineConfig(Section):
    """The whole configuration. Only `model`, `data` and `output_dir` must be given."""

    model: ModelConfig
    """The checkpoint."""
    data: DataConfig
    """The dataset."""
    output_dir: Path
    """The run folder: checkpoints, adapter, logs, evaluations."""
    cache: CacheConfig = CacheConfig()
    """The feature cache."""
    train: TrainConfig = TrainConfig()
    """Training."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""

    @property
    def cache_dir(self) -> Path:
        """The folder of the cache."""
        return self.cache.dir if self.cache.dir is not None else self.output_dir / "features"


def load_config(file: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read `file` and apply `a.b=c` overrides.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value is impossible.
    """
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("there is no such config file", where=str(file), do="check the path after --config") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot be read as YAML: {error}", where=str(file)) from error
    if not isinstance(raw, dict):
        raise ConfigError("must be a mapping with the keys model, data and output_dir", where=str(file))
    return _validate(raw, overrides, str(file))


def config_for_model(model: str, overrides: list[str] | None = None) -> PipelineConfig:
    """A configuration for verbs that need a model and no data."""
    raw: dict[str, Any] = {"model": model, "data": {"splits": {"none": "-"}}, "output_dir": "."}
    return _validate(raw, overrides, "--model")


def dump_config(config: PipelineConfig) -> str:
    """The resolved configuration as YAML; loading it gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validate(raw: dict[str, Any], overrides: list[str] | None, where: str) -> PipelineConfig:
    for override in overrides or []:
        _apply(raw, override)
    try:
        return PipelineConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n  ".join(_explain(error)), where=where, do="see docs/configuration.md") from None


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one `a.b=c`; the value is read as YAML, so 1e-4, true, null and [a, b] work."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    node = raw
    for key in keys[:-1]:
        child = node.get(key)
        if isinstance(child, str) and keys[0] in {"model", "data"}:
            child = {"name_or_path": child} if key == "model" else {"path": child}
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {key} is not a section")
        node[key] = child
        node = child
    try:
        node[keys[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from error


def _explain(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            valid = _valid_keys(item["loc"][:-1])
            near = difflib.get_close_matches(str(item["loc"][-1]), valid, n=3, cutoff=0.5) or sorted(valid)
            lines.append(f"{path}: there is no such setting; nearest: {', '.join(near)}")
        elif item["type"] == "missing":
            lines.append(f"{path}: must be given")
        else:
            lines.append(f"{path}: {item['msg'].removeprefix('Value error, ')} (it is {item['input']!r})")
    return lines


def _valid_keys(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = PipelineConfig
    for part in location:
        field = section.model_fields.get(str(part))
        if field is None:
            break
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            section = kind
    return list(section.model_fields)
