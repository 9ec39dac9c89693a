"""Where the GPU stands still in `pipeline train --from-cache`, beside what its packs alone take. Needs a GPU.

    python -m tests.benchmarks.loop_profile --work /path/on/a/fast/disk [--case NAME] [--rows case|N] [--steps 12]

Runs the whole loop of a case of tests.benchmarks.training_speed under torch's profiler, which lists what ran on the GPU
and when. Of the last half of the steps: the time of a step, how much of it kernels ran (copies from the host beside
them do not count), and the longest pauses, with the kernels before and behind them. If kernels alone take longer than
the packs of training_speed, the GPU was slower in the loop; if not, it waited.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pipeline.config_file import load_config
from tests.benchmarks.train_command import pipeline, take_its_allocator, train_anew
from tests.benchmarks.training_cases import CASES, prepare, valid_rows
from tests.benchmarks.true_shapes import make_8b_checkpoint

COPY, COPIES_BESIDE = "Memcpy", "Memcpy HtoD"
PAUSE, LISTED = 20.0, 12  # microseconds; pauses shorter than this lie between any two kernels


class Interval(NamedTuple):
    """Something that ran on the GPU: microseconds on the profiler's clock."""

    start: float
    end: float
    name: str


class Pause(NamedTuple):
    """Time in which no kernel ran: microseconds, and what ran before and behind it."""

    length: float
    before: str
    behind: str


def main() -> None:
    """Run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--case", choices=list(CASES), default="9 an image")
    parser.add_argument("--rows", type=valid_rows, default="case")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    case = CASES[options.case].with_rows(options.rows)
    case = replace(case, settings={**case.settings, "max_steps": options.steps})
    options.work.mkdir(parents=True, exist_ok=True)
    config = prepare(options.work, make_8b_checkpoint(options.work / "model-8b"), case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        lines = train_anew(
            lambda: pipeline("train", "--config", str(config), "--from-cache"), load_config(config).output_dir
        )
    last = [line["seconds"] for line in lines[len(lines) // 2 :]]
    ran = [
        Interval(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    print(torch.cuda.get_device_name(), options.case, options.rows)
    print("\n".join(report(ran, last, samples=load_config(config).train.effective_batch_size)))


def report(ran: Sequence[Interval], seconds: Sequence[float], *, samples: int) -> list[str]:
    """Lines about the last steps, which took so many seconds each. Copies behind the last kernel save the adapter."""
    end = max(one.end for one in ran if not one.name.startswith(COPY))
    window = [one for one in ran if end - 1e6 * sum(seconds) <= one.start < end]
    busy, pauses = busy_and_pauses(window)
    step, kernels = 1000 * sum(seconds) / len(seconds), busy / 1000 / len(seconds)
    lines = [
        f"a step: {step:.1f} ms, kernels {kernels:.1f}; "
        f"a sample: {step / samples:.2f} ms, kernels {kernels / samples:.2f}",
        f"pauses of more than {PAUSE:.0f} microseconds, ms a step:",
    ]
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for pause in pauses:
        kinds[pause.before[:60], pause.behind[:60]].append(pause.length)
    for (before, behind), lengths in sorted(kinds.items(), key=lambda kind: -sum(kind[1]))[:LISTED]:
        share = sum(lengths) / 1000 / len(seconds)
        lines.append(f"- {share:.2f}, {len(lengths) / len(seconds):.1f} times: `{before}` -> `{behind}`")
    return lines


def busy_and_pauses(ran: Sequence[Interval]) -> tuple[float, list[Pause]]:
    """Microseconds in which any kernel ran, and the pauses between them."""
    busy, pauses = 0.0, []
    kernels = sorted(one for one in ran if not one.name.startswith(COPIES_BESIDE))
    until, last = kernels[0].start, kernels[0].name
    for start, end, name in kernels:
        if start - until > PAUSE:
            pauses.append(Pause(start - until, last, name))
        busy += max(0.0, end - max(start, until))
        if end > until:
            until, last = end, name
    return busy, pauses


if __name__ == "__main__":
    take_its_allocator()
    main()
