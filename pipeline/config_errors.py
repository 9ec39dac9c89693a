"""What is wrong with a configuration, in the user's words: one line a setting, with key, value and a way out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_MUST = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "dict_type": "must be a section (keys and values)",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number, written in digits",
    "int_type": "must be a whole number",
    "list_type": "must be a list, such as [a, b]",
    "missing": "must be given",
    "model_attributes_type": "must be a section (keys and values)",
    "model_type": "must be a section (keys and values)",
    "path_type": "must be a path",
    "string_type": "must be a text; put it in quotes if it looks like a number",
    "tuple_type": "must be a list, such as [a, b]",
}
_BOUNDS = {
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}
# What the settings are called elsewhere, where no likeness of names would lead to ours.
_KNOWN_AS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "effective_batch_size",
    "per_device_train_batch_size": "effective_batch_size",
    "gradient_accumulation_steps": "effective_batch_size",
    "bf16": "precision",
    "fp16": "precision",
    "warmup_ratio": "warmup_steps",
    "cpus": "cpus_per_task",
    "gres": "gpus",
    "queue": "partition",
    "walltime": "time",
    "env": "setup",
}
_FEW = 8  # keys that are listed where none is near


def explain(error: ValidationError, root: type[BaseModel], overridden: Sequence[str] = ()) -> list[str]:
    """One line for each wrong setting.

    Args:
        root: the model that refused the input.
        overridden: dotted keys that were set on the command line.
    """
    found: dict[str, tuple[ErrorDetails, list[str]]] = {}
    for item in error.errors(include_url=False):
        key = _dotted(item["loc"], root)
        # A union complains once for each of its members: one line with all that it would take.
        found.setdefault(key, (item, []))[1].append(_message(item, root))
    return [_line(key, item, messages, overridden) for key, (item, messages) in found.items()]


def _line(key: str, item: ErrorDetails, messages: list[str], overridden: Sequence[str]) -> str:
    line = f"{key}: {', or '.join(dict.fromkeys(messages))}" if key else messages[0]
    notes = []
    # A whole section that contradicts itself is not repeated: the message names the values.
    if item["type"] not in {"missing", "extra_forbidden"} and not (
        item["type"] == "value_error" and isinstance(item["input"], dict)
    ):
        notes.append(f"it is {_show(item['input'])}")
    if any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in overridden):
        notes.append("from --set")
    return f"{line} ({', '.join(notes)})" if notes else line


def _message(item: ErrorDetails, root: type[BaseModel]) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"there is no such setting{_others(item['loc'], root)}"
    if kind in _BOUNDS:
        return _BOUNDS[kind].format_map(context)
    if kind == "literal_error":
        return f"must be {context['expected']}"
    return _MUST.get(kind, item["msg"].removeprefix("Value error, "))


def _show(value: object) -> str:
    if value is None:
        return "empty (null)"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _dotted(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """The setting's key. pydantic's location goes on into lists and names the members of a union."""
    names: list[str] = []
    kind: Any = root
    for part in location:
        if not _is_section(kind) and get_origin(kind) is not dict:
            break
        names.append(str(part))
        kind = _below(kind, part)
    return ".".join(name for name in names if name != "[key]")


def _below(kind: Any, part: int | str) -> Any:
    if get_origin(kind) is dict:
        return get_args(kind)[1]
    field = kind.model_fields.get(str(part))
    return field.annotation if field is not None else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _others(location: Sequence[int | str], root: type[BaseModel]) -> str:
    """The nearest settings; where none is near those of the section, if they are few."""
    section: Any = root
    for part in location[:-1]:
        section = _below(section, part)
    prefix = "".join(f"{part}." for part in location[:-1])
    siblings = sorted(section.model_fields)
    near = _nearest(str(location[-1]), siblings, prefix, root)
    if near:
        return f"; nearest: {', '.join(near)}"
    if len(siblings) <= _FEW:
        return f"; there are: {', '.join(prefix + key for key in siblings)}"
    return f", and none of {prefix.rstrip('.') or 'the sections'} is like it"


def _nearest(name: str, siblings: Sequence[str], prefix: str, root: type[BaseModel]) -> list[str]:
    """Full keys, the likeliest first: a slip of the pen, the same name in another section, a likeness."""
    wanted = {name, _KNOWN_AS.get(name)}
    slips, like = (difflib.get_close_matches(name, siblings, n=3, cutoff=cutoff) for cutoff in (0.85, 0.6))
    elsewhere = [key for key in all_keys(root) if key.rpartition(".")[2] in wanted]
    return list(dict.fromkeys([*(prefix + key for key in slips), *elsewhere, *(prefix + key for key in like)]))


def all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys of all settings of a section and of the sections in it."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if _is_section(field.annotation):
            keys += all_keys(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
    return keys
