"""What a timeline says of pauses; the timelines are given."""

from __future__ import annotations

from .loop_profile import Interval, Pause, busy_and_pauses, report

RAN = [
    Interval(0, 100, "gemm"),
    Interval(40, 60, "small, beside it"),
    Interval(90, 150, "gemm"),
    Interval(155, 200, "norm"),  # right behind it, as kernels are
    Interval(210, 900, "Memcpy HtoD (Pinned -> Device)"),
    Interval(1000, 1200, "gemm"),
]


def test_overlapping_kernels_count_once_and_copies_beside_them_do_not() -> None:
    assert busy_and_pauses(RAN) == (150 + 45 + 200, [Pause(800, "norm", "gemm")])
    assert busy_and_pauses(RAN[::-1]) == busy_and_pauses(RAN)


def test_the_report_is_about_the_last_steps() -> None:
    before = [Interval(-5000, -4000, "compiling")]
    saving = [Interval(1500 + 100 * n, 1550 + 100 * n, "Memcpy DtoH (Device -> Pageable)") for n in range(50)]
    lines = report([*before, *RAN, *saving], [0.0006, 0.0006], samples=2)
    assert lines[0] == "a step: 0.6 ms, kernels 0.2; a sample: 0.30 ms, kernels 0.10"
    assert lines[2:] == ["- 0.40, 0.5 times: `norm` -> `gemm`"]
