"""What a benchmark has measured, one JSON line each as it comes, so that a command that was cut off goes on."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

DOES_NOT_FIT = "does not fit"
ROOT = Path(__file__).parents[2]
DECIDING = ("pipeline", "cache", "train", "tests/benchmarks")


@dataclass(frozen=True)
class Machine:
    """Where, and with what code, rows are measured; rows of another one are left alone."""

    gpu: str
    torch: str
    transformers: str
    commit: str

    @classmethod
    def this(cls, device: str) -> Machine:
        """This one; `device` is its GPU's name."""
        import torch
        import transformers

        return cls(device, torch.__version__, transformers.__version__, commit_of(ROOT))


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kind: whose; `low` is a peer on images of low resolution.
        ms: a sample, forward and backward, for `loop` everything; None where there is no figure.
        reason: why there is none.
        details: more figures, by name.
    """

    name: str
    kind: Literal["peer", "low", "packs", "loop"]
    ms: float | None
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def settled(self) -> bool:
        """Whether measuring it again on this machine would tell nothing new."""
        return self.ms is not None or self.reason == DOES_NOT_FIT


class KeptRows:
    """Rows in a file.

    Args:
        file: JSON lines; those of other machines and commits stay in it.
    """

    def __init__(self, file: Path, machine: Machine) -> None:
        self._file, self.machine = file, machine
        self._rows = {row.name: row for row in _read(file, machine)}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, name: str) -> Row | None:
        """The newest row of that name."""
        return self._rows.get(name)

    def has(self, name: str, *details: str) -> bool:
        """Whether a row is there that need not be measured again, with these details if it has a figure."""
        row = self.get(name)
        return row is not None and row.settled and (row.ms is None or set(details) <= row.details.keys())

    def add(self, row: Row) -> None:
        """Keep it."""
        self._rows.pop(row.name, None)  # the newest stands last, as in the file
        self._rows[row.name] = row
        cut_off = self._file.exists() and not self._file.read_bytes().endswith(b"\n")
        with self._file.open("a", encoding="utf-8") as out:
            out.write("\n" * cut_off + json.dumps(asdict(self.machine) | asdict(row)) + "\n")


def _read(file: Path, machine: Machine) -> Iterator[Row]:
    names = asdict(machine)
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            content = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        if {name: content.pop(name, None) for name in names} == names:
            yield Row(**content)


def commit_of(root: Path) -> str:
    """The commit; with a digest of the code where that differs from it, or where there is no repository."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if commit and _git(root, "status", "--porcelain", "--", *DECIDING) == "":
        return commit
    digest = hashlib.sha256()
    for file in sorted(file for folder in DECIDING for file in (root / folder).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{commit or 'no repository'} + {digest.hexdigest()[:10]}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()
