"""Commands that messages name, made runnable as printed: with the configuration that this process was given.

What is below the verbs knows of no file. It says `pipeline cache --split train`, or NAME where it knows no split.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# The verbs that cannot go without --config.
VERBS = (
    *("plan", "cache", "verify", "repack", "prune", "train", "eval", "merge"),
    *("experiments", "compare", "submit", "status", "cancel", "check"),
)
_COMMAND = re.compile(rf"`pipeline ({'|'.join(VERBS)})((?: [^`]*)?)`")
_PLACEHOLDER = " --split NAME"


class _Given:
    """Of the verb that this process runs: the options that name the configuration, and the splits that it has."""

    options: Sequence[str] = ()
    splits: Sequence[str] = ()


def note_options(config: Path, overrides: Sequence[str] | None) -> None:
    """Called before the configuration is read."""
    _Given.options = ["--config", str(config), *(f"--set={override}" for override in overrides or [])]
    _Given.splits = ()


def note_splits(splits: Sequence[str]) -> None:
    """Called when the configuration has been read."""
    _Given.splits = list(splits)


def forget() -> None:
    """As before a configuration was given, for a process that runs verbs of several."""
    _Given.options, _Given.splits = (), ()


def runnable(text: str) -> str:
    """A message whose commands in backticks have the configuration, and those that cache a split the split.

    Where the message knows no split, the command is that of the first one, and the others are named behind it. A
    process that was given no configuration leaves the text as it is.
    """
    return _COMMAND.sub(_completed, text) if _Given.options else text


def _completed(found: re.Match[str]) -> str:
    verb, rest = found.groups()
    if "--config" in rest:
        return found[0]
    first, others = "", ""
    if verb == "cache" and _Given.splits and ("--split" not in rest or _PLACEHOLDER in rest):
        rest = rest.replace(_PLACEHOLDER, "")
        first = f" --split {shlex.quote(_Given.splits[0])}"
        others = f" (or --split {', '.join(map(shlex.quote, _Given.splits[1:]))})" if _Given.splits[1:] else ""
    return f"`pipeline {verb} {shlex.join(_Given.options)}{rest}{first}`{others}"
