"""Writes docs/configuration.md from the settings' own docstrings: `python -m pipeline.configuration_docs`."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import PipelineConfig
from pipeline.exit import EXIT_CODES

_HEAD = """\
# Configuration

Written by `make docs` from the docstrings of the settings; edit those, not this file.

One YAML file holds everything. Three keys must be given, all others have defaults:

```yaml
model: Qwen/Qwen3-VL-8B-Instruct
data:
  splits: {train: train.jsonl, val: val.jsonl}
output_dir: runs/first
```

An unknown key, a key that stands twice and an impossible value end the program with exit code 2 and name the key, the
value and the nearest valid keys. A leading `~` in a path is the home folder.

## Overrides: `--set KEY=VALUE`

Every verb with a configuration takes `--set` (or `-s`), as often as needed; the last one of a key wins. KEY is the
dotted key of the tables below. VALUE is read as YAML: `1e-4`, `true`, `null`, `[q_proj, v_proj]`, `{train: a.jsonl}`;
quote it for the shell where it holds spaces or brackets.

```
pipeline train --config my.yaml --from-cache --set train.learning_rate=2e-4 --set train.lora.r=32
pipeline cache --config my.yaml --split val --set data.splits.val.image_root=/data/images
pipeline train --config my.yaml --set 'train.report_to=[none]' --set train.eval_split=null
```
"""
_KINDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "null",
    Any: "value",
}


def render() -> str:
    """The whole document."""
    sections = "\n".join(_section("", PipelineConfig, "The file"))
    return f"{_HEAD}\n{sections}\n\n{_exit_codes()}"


def _section(prefix: str, section: type[BaseModel], title: str) -> list[str]:
    """A table for a section, then those of the sections in it."""
    doc = " ".join((section.__doc__ or "").split())
    lines = [f"## {title}", "", doc, "", "| Key | Type | Default | Meaning |", "|---|---|---|---|"]
    below: list[str] = []
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        inner = _inner_section(field.annotation)
        if inner is not None:
            key_below = key if inner is field.annotation else f"{key}.NAME"
            below += ["", *_section(f"{key_below}.", inner, f"`{key_below}`")]
        cells = [f"`{key}`", _kind(field.annotation), _default(field), field.description or ""]
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return lines + below


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or that each value of its mapping is."""
    kind = get_args(annotation)[1] if get_origin(annotation) is dict else annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kind(annotation: Any) -> str:
    """A type in the words of someone who writes YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments)
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"mapping of name to {_kind(arguments[1])}"
    return "section" if _inner_section(annotation) else _KINDS[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if isinstance(value, BaseModel):
        return "see below"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower()}`".replace("none", "null")
    return f"`[{', '.join(value)}]`" if isinstance(value, tuple) else f"`{value}`"


def _exit_codes() -> str:
    head = [
        "## Exit codes",
        "",
        "Every mistake that a user can mend is one message on standard error: what, which value, where, what to do.",
        "",
        "| Code | Meaning |",
        "|---|---|",
    ]
    return "\n".join([*head, *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
