"""How far caching and training have come, from what they have committed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from train.run_folder import METRICS_FILE


@dataclass(frozen=True, slots=True)
class PartsProgress:
    """How far the parts of a split are.

    Attributes:
        parts: (committed, all) distinct images of each part.
        commits: of each shard with such images when it was written, and how many of them it has of each part.
    """

    parts: tuple[tuple[int, int], ...]
    commits: tuple[tuple[datetime, tuple[int, ...]], ...]
    looked: datetime

    def end_of(self, part: int, started: datetime) -> datetime | None:
        """When a part will be done if it goes on as since `started`; None while nothing can be said."""
        done, total = self.parts[part]
        # What was there before, of an earlier start or because another split has it too, tells nothing of the pace.
        since = sum(counts[part] for written, counts in self.commits if written >= started)
        if since == 0 or self.looked <= started:
            return None
        return self.looked + (self.looked - started) * ((total - done) / since)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The last line of metrics.jsonl that tells of a step.

    Attributes:
        seconds_left: None in the first line of a start.
    """

    step: int
    max_steps: int
    seconds_left: float | None
    written: datetime

    @property
    def end(self) -> datetime | None:
        """When the last step will be done, without the evaluations to come; None while that cannot be told."""
        return None if self.seconds_left is None else self.written + timedelta(seconds=self.seconds_left)

    def describe(self) -> str:
        """`step 20 of 300`."""
        return f"step {self.step} of {self.max_steps}"


def parts_progress(folder: Path, split: str, num_parts: int) -> PartsProgress | None:
    """Of a split of the cache in `folder`; None while its image list is not written."""
    from cache.index import EntryIndex
    from cache.manifest import SHARDS
    from cache.parts import part_of
    from cache.split_files import load_split

    listed = load_split(folder, split)
    if listed is None:
        return None
    wanted = {image.key for image in listed.images}
    commits = []
    for shard, keys in EntryIndex.open(folder).by_shard():
        found = Counter(part_of(key, num_parts) for key in keys if key in wanted)
        if found:
            written = datetime.fromtimestamp((folder / SHARDS / shard).stat().st_mtime)
            commits.append((written, tuple(found[part] for part in range(num_parts))))
    totals = Counter(part_of(key, num_parts) for key in wanted)
    parts = tuple((sum(counts[part] for _, counts in commits), totals[part]) for part in range(num_parts))
    return PartsProgress(parts, tuple(commits), datetime.now())


def stage_progress(folder: Path) -> StageProgress | None:
    """Of the training run in `folder`; None before its first log line."""
    file = folder / METRICS_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        written = datetime.fromtimestamp(file.stat().st_mtime)
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue  # being written
        if "samples_per_second" in found and "max_steps" in found:
            left = found.get("seconds_left")
            return StageProgress(
                int(found["step"]), int(found["max_steps"]), None if left is None else float(left), written
            )
    return None
