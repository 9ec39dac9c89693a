"""Time of training at the 8B's true shapes on one GPU, others' and this project's; writes Markdown tables.

    python -m tests.benchmarks.training_speed --work /path/on/a/fast/disk --out table.md --peers --profile
    python -m tests.benchmarks.training_speed --work FOLDER --out table.md --peers --tiny    # on a CPU, to try it

Peers are tests.benchmarks.peer_speed's. This project's rows are forward and backward of packs made by the training code
(LoRA rank 32 on all linear layers, bf16), and the whole `pipeline train --from-cache` loop: reading, optimizer,
logging; each with rows of a few images (`case`) and with rows that the calibration picks for a larger step (`auto`).
Figures are medians after warm-up. --profile says on which kernels the time of the packs went.

Each row is kept as it comes, as a JSON line beside the table (table.jsonl). A command that was cut off is given again:
rows of the same GPU, versions and commit are there, and it goes on with the others. Those that could not run are tried
again, those that did not fit are not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.device_clock import cap_memory
from tests.benchmarks.kept_rows import KeptRows, Machine, Row
from tests.benchmarks.own_speed import loop_row, packs_row
from tests.benchmarks.peer_speed import PEERS, peer_rows
from tests.benchmarks.train_command import take_its_allocator
from tests.benchmarks.training_cases import CASES, Case, prepare, rows_label, valid_rows
from tests.benchmarks.training_table import LOOP, PACKS, full_name, tables
from tests.benchmarks.true_shapes import make_8b_checkpoint


def main() -> None:
    """Run what is missing and write the tables."""
    options = parse()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("training_speed: this machine has no GPU; --tiny tries the command on a CPU")
    machine = Machine.this("CPU, tiny" if options.tiny else torch.cuda.get_device_name())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = KeptRows(options.out.with_suffix(".jsonl"), machine)
    measures = Measures(
        peers=lambda names: peer_rows(names, options.liger_path, tiny=options.tiny),
        packs=packs_row,
        loop=loop_row,
        config_of=_configurations(options),
    )
    for row in missing_rows(options, kept, measures):
        kept.add(row)
        options.out.write_text("\n".join(tables(machine, kept)) + "\n", encoding="utf-8")
        print(f"{row.name}: {row.reason or f'{row.ms:.1f} ms a sample'}", flush=True)
    options.out.write_text("\n".join(tables(machine, kept)) + "\n", encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--rows",
        nargs="*",
        type=valid_rows,
        default=["case", "auto"],
        metavar="case|auto|N",
        help="tokens a row: the case's own, with few images a step; or what the calibration picks, or N, with four "
        "times as many images a step",
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--liger-path", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-loop", action="store_true")
    parser.add_argument("--attention", default="auto", help="auto, flash, flex: train.attention")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Measures:
    """What takes the time.

    Attributes:
        peers: rows of peers by name, as they come.
        packs: packs_row.
        loop: loop_row.
        config_of: makes what a case needs, and gives its configuration.
    """

    peers: Callable[[list[str]], Iterator[Row]]
    packs: Callable[..., Row]
    loop: Callable[[Path, str, Row | None], Row]
    config_of: Callable[[Case], Path]


def missing_rows(options: argparse.Namespace, kept: KeptRows, measures: Measures) -> Iterator[Row]:
    """Measure what was asked for and is not there. Each row must be kept before the next is asked for."""
    if options.peers:
        names = [name for name in PEERS if not kept.has(name)]
        if names:
            yield from measures.peers(names)
    attention = "" if options.attention == "auto" else f", {options.attention}"
    details = ["profile"] * options.profile
    for rows in options.rows:
        for name in options.cases:
            label = f"{rows_label(rows)}{attention}"
            packs, loop = full_name(name, label, PACKS), full_name(name, label, LOOP)
            bare, whole = not kept.has(packs, *details), not options.no_loop and not kept.has(loop)
            config = measures.config_of(CASES[name].with_rows(rows)) if bare or whole else Path()
            if bare:
                yield measures.packs(config, packs, profile=options.profile)
            if whole:
                yield measures.loop(config, loop, kept.get(packs))


def _configurations(options: argparse.Namespace) -> Callable[[Case], Path]:
    device = torch.device("cpu") if options.tiny else torch.device("cuda", 0)

    def config_of(case: Case) -> Path:
        cap_memory(device, case.gib)
        options.work.mkdir(parents=True, exist_ok=True)
        folder = options.work / ("model-tiny" if options.tiny else "model-8b")
        checkpoint = make_tiny_checkpoint(folder) if options.tiny else make_8b_checkpoint(folder)
        return prepare(options.work, checkpoint, case, attention=options.attention, tiny=options.tiny)

    return config_of


if __name__ == "__main__":
    take_its_allocator()
    main()
