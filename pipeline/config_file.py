"""One YAML file, overrides on the command line, unknown keys refused with the nearest valid ones."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from pipeline.config_errors import explain
from pipeline.experiments import experiments_of


def load_config(file: Path, overrides: list[str] | None = None) -> PipelineConfig:
    """Read `file` and apply `a.b=c` overrides.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value is impossible.
    """
    try:
        raw = _read_yaml(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError("there is no such config file", where=str(file), do="check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(file), do="name a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8: {error.reason}", where=str(file), do="save it as UTF-8") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {_one_line(error)}", where=str(file), do="correct that line") from error
    if not isinstance(raw, dict):
        content = "is empty" if raw is None else f"holds a {type(raw).__name__}"
        raise ConfigError(
            f"{content}; it must be a mapping with the keys model, data and output_dir",
            where=str(file),
            do="see docs/configuration.md",
        )
    return _validate(raw, overrides, str(file))


def config_for_model(model: str, overrides: list[str] | None = None) -> PipelineConfig:
    """A configuration for verbs that need a model and no data."""
    raw: dict[str, Any] = {"model": model, "data": {"splits": {"none": "-"}}, "output_dir": "."}
    return _validate(raw, overrides, "--model")


def dump_config(config: PipelineConfig) -> str:
    """The resolved configuration as YAML; loading it gives an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: plain YAML keeps the last one, and a whole section may be lost that way."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506  (a SafeLoader)


def _one_line(error: yaml.YAMLError) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return f"{problem or str(error).splitlines()[0]}{place}"


def _validate(raw: dict[str, Any], overrides: list[str] | None, where: str) -> PipelineConfig:
    overridden = [_apply(raw, override) for override in overrides or []]
    # A section with nothing below it is null in YAML; it means its defaults.
    given = {name: section for name, section in raw.items() if section is not None}
    try:
        config = PipelineConfig.model_validate(given)
    except ValidationError as error:
        lines = explain(error, PipelineConfig, overridden)
        raise ConfigError("\n  ".join(lines), where=where, do="see docs/configuration.md") from None
    if config.experiments:
        # A mistake in any of them is told before the first one runs.
        try:
            experiments_of(config)
        except ConfigError as error:
            raise ConfigError(error.what, where=where, do=error.do) from None
    return config


def _apply(raw: dict[str, Any], override: str) -> str:
    """Set one `a.b=c` and return the key; the value is read as YAML, so 1e-4, true, null and [a, b] work."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(
            f"--set {override!r} is not of the form section.key=value", do="write it as in --set train.lora.r=32"
        )
    node = raw
    for depth, key in enumerate(keys[:-1], 1):
        child = _unfold(node.get(key), keys[:depth])
        if not isinstance(child, dict):
            raise ConfigError(
                f"--set {override!r}: {'.'.join(keys[:depth])} is a value, not a section",
                do="see docs/configuration.md",
            )
        node[key] = child
        node = child
    try:
        node[keys[-1]] = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"--set {override!r}: the value is not YAML: {_one_line(error)}", do="quote it for the shell and for YAML"
        ) from error
    return ".".join(keys)


def _unfold(child: object, keys: list[str]) -> object:
    """A plain string that stands for a section is written as one, so that its other settings can be set."""
    if child is None:
        return {}
    if isinstance(child, str) and keys == ["model"]:
        return {"name_or_path": child}
    if isinstance(child, str) and keys[:-1] == ["data", "splits"]:
        return {"path": child}
    return child
