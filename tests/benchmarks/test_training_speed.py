"""Which rows the training benchmark measures, keeps and compares; the measurements are given, or tiny."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from . import kernel_profile, peer_speed, training_speed, training_table
from .kept_rows import DOES_NOT_FIT, KeptRows, Machine, Row, commit_of
from .peer_speed import PEERS
from .training_cases import CASES, Case

MACHINE = Machine("a GPU", "2.11", "5.23", "abc")
LOW, BEST = "stock + Liger, 448x448, batch 32", "stock + Liger, batch 12"


class Bench:
    """Gives figures instead of measuring them; ends as a command does that is cut off."""

    def __init__(self, file: Path, *, rows_before_the_end: int = 1000, machine: Machine = MACHINE) -> None:
        self.kept, self.asked, self.configured = KeptRows(file, machine), [], []
        self._left = rows_before_the_end

    def run(self, *arguments: str) -> None:
        """The command with these arguments, besides the folders."""
        options = training_speed.parse(["--work", "w", "--out", "o", *arguments])
        measures = training_speed.Measures(self._peers, self._packs, self._loop, self._config_of)
        for row in training_speed.missing_rows(options, self.kept, measures):
            if not self._left:
                return
            self._left -= 1
            self.kept.add(row)

    def _peers(self, names: list[str]) -> Iterator[Row]:
        for name in names:
            self.asked.append(name)
            ms = {LOW: 24.0, BEST: 112.0}.get(name, 160.0)
            row = Row(name, PEERS[name].kind, ms, details={"versions": {"liger-kernel": "0.8.5"}})
            yield replace(row, ms=None, reason=DOES_NOT_FIT) if name == "stock + Liger, batch 16" else row

    def _packs(self, config: Path, name: str, *, profile: bool) -> Row:
        self.asked.append(name)
        details = {"tokens_per_pack": 23328, "samples": 144} | ({"profile": PROFILE} if profile else {})
        return Row(name, "packs", 11.2 if "FP8" in name else 16.0, details=details)

    def _loop(self, config: Path, name: str, packs: Row | None) -> Row:
        self.asked.append(name)
        assert packs is not None
        return Row(name, "loop", 20.0, details={"tokens_per_pack": packs.details["tokens_per_pack"]})

    def _config_of(self, case: Case) -> Path:
        self.configured.append(case)
        return Path("my.yaml")


PROFILE = kernel_profile.shared_out(
    [
        ("nvjet_tst_128x256", 200, 600.0),
        ("sm90_xmma_gemm_e4m3", 9, 100.0),
        ("flash_fwd_sm90", 36, 200.0),
        ("triton_poi_fused_mul", 5, 75.0),
        ("never_ran", 1, 0.0),
        ("reduce_kernel", 1, 25.0),
    ]
) | {"samples": 36}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "table.jsonl"


def test_a_command_that_was_cut_off_goes_on_with_what_is_missing(file: Path) -> None:
    Bench(file, rows_before_the_end=5).run("--peers")
    second = Bench(file)
    second.run("--peers")
    assert second.asked[0] == list(PEERS)[5]
    assert len(second.asked) == len(PEERS) - 5 + 2 * 2 * len(CASES)
    third = Bench(file)
    third.run("--peers")
    assert not third.asked
    assert not third.configured  # neither checkpoint nor cache is made for nothing


def test_a_line_cut_off_by_a_kill_is_measured_again(file: Path) -> None:
    Bench(file).run("--cases", "1 an image", "--rows", "case", "--no-loop")
    whole = file.read_text()
    file.write_text(whole[:-20])
    again = Bench(file)
    again.run("--cases", "1 an image", "--rows", "case", "--no-loop")
    assert again.asked == ["1 an image, packs"]
    assert file.read_text() == f"{whole[:-20]}\n{whole}"


@pytest.mark.parametrize("other", [{"commit": "def"}, {"gpu": "another"}, {"torch": "2.13"}, {"transformers": "6"}])
def test_rows_of_another_machine_or_commit_count_for_nothing(file: Path, other: dict[str, str]) -> None:
    arguments = ("--cases", "1 an image", "--rows", "auto", "--peers")
    Bench(file).run(*arguments)
    elsewhere = Bench(file, machine=replace(MACHINE, **other))
    assert not list(elsewhere.kept)
    elsewhere.run(*arguments)
    assert len(elsewhere.asked) == len(PEERS) + 2
    assert len(list(KeptRows(file, MACHINE))) == len(PEERS) + 2  # and they stay


def test_what_could_not_run_is_tried_again_and_what_does_not_fit_is_not(file: Path) -> None:
    kept = KeptRows(file, MACHINE)
    kept.add(Row(BEST, "peer", None, "not run: ModuleNotFoundError: No module named 'liger_kernel'"))
    kept.add(Row("stock + Liger, batch 16", "peer", None, DOES_NOT_FIT))
    bench = Bench(file)
    bench.run("--peers", "--cases")
    assert BEST in bench.asked
    assert "stock + Liger, batch 16" not in bench.asked
    assert KeptRows(file, MACHINE).get(BEST) == bench.kept.get(BEST)


def test_a_profile_that_is_asked_for_later_is_taken(file: Path) -> None:
    arguments = ("--cases", "9 an image", "--rows", "case")
    Bench(file).run(*arguments)
    bench = Bench(file)
    bench.run(*arguments, "--profile")
    assert bench.asked == ["9 an image, packs"]


def test_rows_of_the_calibration_cut_larger_steps(file: Path) -> None:
    bench = Bench(file)
    bench.run("--cases", "9 an image", "--rows", "case", "auto", "20480", "--no-loop")
    assert bench.asked == [
        "9 an image, packs",
        "9 an image, rows auto, packs",
        "9 an image, rows of 20480, packs",
    ]
    assert [(case.images, case.tokens_per_pack) for case in bench.configured] == [(4, 10240), (16, "auto"), (16, 20480)]


@pytest.mark.parametrize("rows", ["all", "0", "-1", "1.5"])
def test_other_rows_are_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training_speed.parse(["--work", "w", "--out", "o", f"--rows={rows}"])
    assert "--rows" in capsys.readouterr().err


def test_the_table_compares(file: Path) -> None:
    bench = Bench(file)
    bench.run("--peers", "--profile", "--cases", "9 an image", "9 an image, FP8 base", "--rows", "auto")
    text = "\n".join(training_table.tables(MACHINE, bench.kept))
    assert text.startswith("a GPU, torch 2.11, transformers 5.23, commit abc\n")
    assert "| stock + Liger, batch 16 | does not fit |  | liger-kernel 0.8.5 |" in text
    # 112 / 16, 16 / 24; the loop 112 / 20, 20 / 24, 16 / 20
    assert "| 9 an image, rows auto, packs | 16.0 | 7.00 | 0.67 |  | 144 | 23328 |" in text
    assert "| 9 an image, rows auto, whole loop | 20.0 | 5.60 | 0.83 | 0.80 |" in text
    assert "| 9 an image, FP8 base, rows auto, packs | 11.2 | 10.00 | 0.47 |" in text
    assert "| 9 an image, rows auto, packs | 1 | 36 | 0.0% | 7.5% | 10.0% | 20.0% | 60.0% | 0.0% | 2.5% |" in text
    assert "- 60.0%, 200 times, `nvjet_tst_128x256`" in text


def test_without_peers_there_is_nothing_to_compare_with(file: Path) -> None:
    bench = Bench(file)
    bench.run("--cases", "9 an image", "--rows", "case", "--no-loop")
    assert training_table.tables(MACHINE, bench.kept)[-1].startswith("| 9 an image, packs | 16.0 |  |  |  | 144 |")


def _child(code: str) -> list[Row]:
    wanted = ["stock + Liger, batch 4", "stock + Liger, batch 8"]
    return list(peer_speed.rows_of([sys.executable, "-c", code], wanted, dict(os.environ)))


def test_a_peer_whose_process_dies_is_a_row_with_the_reason() -> None:
    first = asdict(Row("stock + Liger, batch 4", "peer", 118.8))
    rows = _child(f"import json, os; print('hello'); print(json.dumps({first}), flush=True); os._exit(9)")
    assert rows == [
        Row("stock + Liger, batch 4", "peer", 118.8),
        Row("stock + Liger, batch 8", "peer", None, "not run: its process ended with 9"),
    ]


def test_a_peer_that_does_not_import_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    (row,) = peer_speed.measured([BEST], tiny=True)
    assert row.ms is None
    assert row.reason.startswith("not run: ModuleNotFoundError: ")
    assert not row.settled
    assert "liger-kernel" in row.details["versions"]


def test_code_without_a_repository_is_known_by_its_content(tmp_path: Path) -> None:
    module = tmp_path / "train" / "loss.py"
    module.parent.mkdir()
    module.write_text("a = 1\n")
    before = commit_of(tmp_path)
    module.write_text("a = 2\n")
    assert before.startswith("no repository + ")
    assert commit_of(tmp_path) != before


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_ovscale_TNT", "FP8 products"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN", "other products"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90", "FlashAttention"),
        ("triton_tem_fused_flex_attention_backward_2", "flex_attention"),
        ("triton_red_fused__scaled_mm__to_copy_abs_add_amax_clamp_div_mul_ones_silu", "compiled element-wise"),
        ("triton_poi_fused_addmm_mul_silu_10", "compiled element-wise"),
        ("triton_tem_fused_mm_3", "other products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_kernels_are_told_apart(kernel: str, kind: str) -> None:
    """By names as an H200 showed them."""
    assert kernel_profile.kind_of(kernel) == kind
