"""Tasks of a job array as SLURM writes them: `0-3,7%2`, and the name of a job with its tasks: `123_[0,3-5]`."""

from __future__ import annotations

from collections.abc import Collection


def parse_tasks(text: str) -> frozenset[int]:
    """The tasks of `3-5,8%2`; what stands behind the %, how many may run at once, is left out.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in text.partition("%")[0].split(","):
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        found.update(range(int(first), int(last or first) + 1, int(step or 1)))
    return frozenset(found)


def render_tasks(tasks: Collection[int], max_running: int | None = None) -> str:
    """`0-3,7%2`: as --array takes it."""
    runs: list[list[int]] = []
    for task in sorted(tasks):
        if runs and task == runs[-1][-1] + 1:
            runs[-1].append(task)
        else:
            runs.append([task])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{text}%{max_running}" if max_running else text


def parse_name(name: str) -> tuple[str, frozenset[int] | None]:
    """The number that sbatch gave, and the tasks: `12` has none, `12_3` one, `12_[0,3-5%2]` several.

    Raises:
        ValueError: the tasks are no list of them.
    """
    number, underscore, tasks = name.partition("_")
    return number, parse_tasks(tasks.removeprefix("[").removesuffix("]")) if underscore else None


def render_name(number: str, tasks: Collection[int] | None) -> str:
    """The other way round."""
    if tasks is None:
        return number
    text = render_tasks(tasks)
    return f"{number}_{text}" if text.isdigit() else f"{number}_[{text}]"


def one_by_one(name: str) -> list[str]:
    """A name as --dependency takes it, which knows no lists: `12_[0,3]` is `12_0` and `12_3`."""
    number, tasks = parse_name(name)
    return [number] if tasks is None else [f"{number}_{task}" for task in sorted(tasks)]
