"""The training table from rows: what they took, and against the best peer, the low-resolution peer and bare packs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.benchmarks.kept_rows import Machine, Row

LOOP, PACKS = "whole loop", "packs"


def full_name(case: str, rows: str, what: str) -> str:
    """A row's name."""
    return f"{case}{rows}, {what}"


def tables(machine: Machine, rows: Iterable[Row]) -> list[str]:
    """Lines of Markdown."""
    rows = list(rows)
    peers = [row for row in rows if row.kind in ("peer", "low")]
    own = [row for row in rows if row.kind in (PACKS, "loop")]
    lines = [f"{machine.gpu}, torch {machine.torch}, transformers {machine.transformers}, commit {machine.commit}"]
    if peers:
        lines += ["", *_peer_table(peers)]
    if own:
        lines += ["", *_own_table(own, peers)]
    profiles = [(row.name, row.details["profile"]) for row in own if "profile" in row.details]
    return [*lines, *(["", *_profile_table(profiles)] if profiles else [])]


def best(rows: Iterable[Row], kind: str) -> float | None:
    """The shortest time a sample of that kind of peer."""
    return min((row.ms for row in rows if row.kind == kind and row.ms is not None), default=None)


def _peer_table(peers: Sequence[Row]) -> list[str]:
    lines = _head(["peer", "ms / sample", "peak GiB", "with"])
    for row in peers:
        versions = [f"{name} {number}" for name, number in row.details.get("versions", {}).items()]
        lines.append(_line([row.name, _time(row), _number(row.details.get("peak_gib"), ".1f"), ", ".join(versions)]))
    return lines


def _own_table(own: Sequence[Row], peers: Sequence[Row]) -> list[str]:
    figures: dict[str, tuple[str, str]] = {
        "samples a step": ("samples", "d"),
        "tokens a row, at most": ("tokens_per_pack", "d"),
        "longest row": ("longest_pack", "d"),
        "tokens / sample": ("tokens_per_sample", ".0f"),
        "padding": ("padding", ".1%"),
        "peak GiB": ("peak_gib", ".1f"),
        "allocator's retries": ("alloc_retries", "d"),
        "data wait": ("data_wait", ".1%"),
        "first step s": ("first_step_s", ".0f"),
    }
    lines = _head(["what", "ms / sample", "best peer / it", "it / 448x448 peer", "packs / loop", *figures])
    packs = {row.name: row.ms for row in own if row.kind == PACKS}
    for row in own:
        bare = packs.get(row.name.removesuffix(LOOP) + PACKS) if row.kind == "loop" else None
        ratios = [
            _ratio(best(peers, "peer"), row.ms),
            _ratio(row.ms, best(peers, "low")),
            _ratio(bare, row.ms),
        ]
        name = f"{row.name} (activations recomputed)" if row.details.get("checkpointing") else row.name
        lines.append(_line([name, _time(row), *ratios, *(_number(row.details.get(k), f) for k, f in figures.values())]))
    return lines


def _profile_table(profiles: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    kinds = list(profiles[0][1]["shares"])
    lines = _head(["where the time goes", "kernels, ms", "samples", *kinds])
    for name, profile in profiles:
        shares = [_number(profile["shares"][kind], ".1%") for kind in kinds]
        lines.append(_line([name, f"{profile['kernels_ms']:.0f}", str(profile["samples"]), *shares]))
    for name, profile in profiles:
        lines += ["", f"{name}, the longest kernels:", ""]
        lines += [f"- {share:.1%}, {count} times, `{kernel}`" for share, count, kernel in profile["longest"]]
    return lines


def _time(row: Row) -> str:
    return row.reason if row.ms is None else f"{row.ms:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
