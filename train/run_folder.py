"""What a run leaves in its folder, and how the next start finds it.

config.yaml            the resolved configuration, for the record
checkpoint-STEP/       transformers.Trainer's checkpoints
metrics.jsonl          one line a log, evaluation or end
adapter/               the final adapter, loadable by PeftModel.from_pretrained
run.json               settings and rows that decide the result, and whether the run is finished
"""

from __future__ import annotations

import json
import secrets
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from cache.atomic import flush_folder, flush_name, write_text
from cache.errors import ConfigError

ADAPTER, METRICS_FILE, RUN_FILE, CONFIG_FILE = "adapter", "metrics.jsonl", "run.json", "config.yaml"
_COMPLETE = ("trainer_state.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; Trainer writes trainer_state.json last."""
    found = sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True)
    return next((path for path in found if _step_of(path) >= 0 and _is_complete(path)), None)


def open_run(folder: Path, settings: dict[str, Any], rows: str, *, resume: bool) -> Path | None:
    """Check that the folder holds this run or none, note the run in it, and find the checkpoint to go on from.

    Args:
        rows: digest of the rows that are trained on.

    Raises:
        ConfigError: see find_run; also where the run in the folder was trained on other rows.
    """
    checkpoint = find_run(folder, settings, resume=resume)
    trained_on = rows_of(folder)
    if trained_on not in (None, rows):
        raise ConfigError(
            "the rows of the training split have changed since the run in this folder began",
            where=str(folder),
            do="give another output_dir (with cache.dir the cache is still used), or set the rows back",
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, settings, rows, finished=read_run(folder).get("finished"))
    return checkpoint


def rows_of(folder: Path) -> str | None:
    """Digest of the rows that the run in a folder has been trained on; None before its first checkpoint or unknown."""
    if last_checkpoint(folder) is None and not (folder / ADAPTER).exists():
        return None
    rows = read_run(folder).get("rows")
    return rows if isinstance(rows, str) else None


def find_run(folder: Path, settings: dict[str, Any], *, resume: bool) -> Path | None:
    """Check that the folder holds this run or none, and find the checkpoint to go on from; writes nothing.

    Args:
        settings: everything that decides the result, flat.

    Raises:
        ConfigError: the folder holds checkpoints of a run with other settings, or `resume` is off.
    """
    checkpoint = last_checkpoint(folder)
    run_file = folder / RUN_FILE
    if checkpoint is not None and not resume:
        raise ConfigError(
            f"the run folder holds {checkpoint.name} and train.resume is false",
            where=str(folder),
            do="give another output_dir, or move the old run away",
        )
    if run_file.exists() and (checkpoint is not None or (folder / ADAPTER).exists()):
        there = read_run(folder).get("settings", {})
        changed = [
            f"{name}: {there.get(name)!r} there, {settings.get(name)!r} now"
            for name in sorted(there.keys() | settings.keys())
            if there.get(name) != settings.get(name)
        ]
        if changed:
            raise ConfigError(
                "the run folder holds a run with other settings:\n    " + "\n    ".join(changed),
                where=str(folder),
                do="give another output_dir, or set the settings back to go on with that run",
            )
    return checkpoint


def read_run(folder: Path) -> dict[str, Any]:
    """The content of run.json; empty when there is none."""
    try:
        content = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"is damaged: {error}", where=str(folder / RUN_FILE), do="remove it") from error
    return content if isinstance(content, dict) else {}


def write_run(folder: Path, settings: dict[str, Any], rows: str, *, finished: dict[str, float] | None) -> None:
    """Write run.json; `finished` is the length of a finished run."""
    content = {"settings": settings, "rows": rows, "finished": finished}
    write_text(folder / RUN_FILE, json.dumps(content, indent=1, sort_keys=True))


def save_folder(target: Path, save: Callable[[Path], None]) -> None:
    """Let `save` fill a folder aside, then put it in the place of `target`."""
    aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        save(aside)
        flush_folder(aside)
        if target.exists():
            old = target.with_name(f"{target.name}.old-{secrets.token_hex(4)}")
            target.rename(old)
            aside.rename(target)
            shutil.rmtree(old)
        else:
            aside.rename(target)
        flush_name(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _step_of(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _is_complete(path: Path) -> bool:
    if not all((path / name).is_file() for name in _COMPLETE):
        return False
    # torch.save writes zip archives, whose directory stands at the end: a file that was cut off has none.
    if not all(zipfile.is_zipfile(file) for file in [*path.glob("*.pt"), *path.glob("*.pth")]):
        return False
    try:
        json.loads((path / _COMPLETE[0]).read_text(encoding="utf-8"))
        with safe_open(path / _COMPLETE[1], framework="pt"):
            pass
    except (OSError, ValueError, SafetensorError):
        return False
    return True
