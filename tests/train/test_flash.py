"""The path to FlashAttention: who sees whom, gradients, and what is asked for where it cannot run.

The library's own kernels run on Hopper GPUs alone: tests.benchmarks.attention_speed holds them against fp32 there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError
from torch.nn.functional import scaled_dot_product_attention

import tests.train.flash_on_cpu  # noqa: F401
from cache import flash
from cache.errors import ConfigError
from tests.train.test_attention import visibilities
from train.attention import attention_kind, register
from train.config import TrainConfig
from train.flash import flash_attention, packed_flash
from train.pack_mask import BlockLayout, dense_mask

CPU = torch.device("cpu")


def _states(length: int) -> list[torch.Tensor]:
    """Query, key, value as a layer makes them: (1, heads, S, head_dim), transposed views, fp32."""
    generator = torch.Generator().manual_seed(length)
    drawn = (torch.randn(1, length, heads, 16, generator=generator) for heads in (4, 2, 2))
    return [x.transpose(1, 2).requires_grad_() for x in drawn]


@given(until=visibilities())
@settings(max_examples=25)
def test_output_and_gradients_are_those_of_the_dense_mask(until: npt.NDArray[np.int64]) -> None:
    tensor = torch.from_numpy(until)
    ours, theirs = _states(len(until)), _states(len(until))
    attended = flash_attention(*ours, BlockLayout.of(until).block_mask(tensor), 0.3)
    mask = dense_mask(tensor)
    expected = scaled_dot_product_attention(*theirs, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attended, expected)
    wanted = torch.randn(attended.shape, generator=torch.Generator().manual_seed(0))
    for found, right in zip(
        torch.autograd.grad(attended, ours, wanted), torch.autograd.grad(expected, theirs, wanted), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_the_operator_keeps_torchs_rules() -> None:
    """Shapes without data, gradients and aliasing, by torch's own check."""
    until = np.repeat([150, 256], [150, 106])
    mask = BlockLayout.of(until).block_mask(torch.from_numpy(until))
    blocks = (
        *(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        *(mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices),
    )
    torch.library.opcheck(packed_flash, (*_states(256), mask.visible_until, *blocks, 0.25))


def test_auto_takes_what_runs_here() -> None:
    assert attention_kind(TrainConfig(), CPU) == "sdpa"
    assert attention_kind(TrainConfig(attention="sdpa"), CPU) == "sdpa"


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_a_gpus_way_is_refused_without_one(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"train.attention: {kind} needs a GPU"):
        attention_kind(TrainConfig(attention=kind), CPU)  # type: ignore[arg-type]


def test_flash_in_fp32_is_refused() -> None:
    with pytest.raises(ValidationError, match="computes in bf16 or fp16"):
        TrainConfig(attention="flash", precision="fp32")


@pytest.mark.parametrize(
    ("capability", "installed", "precision", "kind"),
    [
        ((9, 0), True, "bf16", "flash"),
        ((9, 0), True, "fp32", "flex"),
        ((9, 0), False, "bf16", "flex"),
        ((8, 0), True, "bf16", "flex"),
    ],
)
def test_auto_on_a_gpu(
    capability: tuple[int, int], installed: bool, precision: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash, "is_installed", lambda: installed)
    assert attention_kind(TrainConfig(precision=precision), torch.device("cuda", 0)) == kind  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "what"), [((8, 0), "needs a Hopper GPU .* an A100"), ((9, 0), "needs the package flash-attn-4")]
)
def test_flash_says_what_it_lacks(capability: tuple[int, int], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(flash, "is_installed", lambda: False)
    with pytest.raises(ConfigError, match=what):
        attention_kind(TrainConfig(attention="flash"), torch.device("cuda", 0))


def test_a_broken_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("import no_such_compiler")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert flash.is_installed()
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'no_such_compiler'"):
        register("flash")
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
