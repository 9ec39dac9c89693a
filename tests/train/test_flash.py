"""The path to FlashAttention: who sees whom, gradients, and what is asked for where it cannot run.

The library's own kernels run on Hopper GPUs alone: tests.benchmarks.attention_speed holds them against fp32 there.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from pydantic import ValidationError
from torch.nn.functional import scaled_dot_product_attention

import tests.train.flash_on_cpu  # noqa: F401
from cache import flash
from cache.config import ModelConfig
from cache.errors import ConfigError
from tests.train.test_attention import visibilities
from train.attention import attention_kind, flash_packed_attention, what_auto_is
from train.config import TrainConfig
from train.flash import flash_attention, packed_flash
from train.model import load_full_model, load_language_model
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
    ("capability", "installed", "precision", "kind", "advice"),
    [
        ((9, 0), flash.VERSION, "bf16", "flash", ""),
        ((9, 0), flash.VERSION, "fp32", "flex", ""),
        ((9, 0), "4.0.0b1", "bf16", "flex", f"; flash is faster on this GPU: {flash.INSTALL}"),
        ((9, 0), None, "bf16", "flex", f"; flash is faster on this GPU: {flash.INSTALL}"),
        ((8, 0), flash.VERSION, "bf16", "flex", ""),
    ],
)
def test_auto_on_a_gpu(
    capability: tuple[int, int],
    installed: str | None,
    precision: Literal["bf16", "fp32"],
    kind: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(flash, "_installed_version", lambda: installed)
    config, device = TrainConfig(precision=precision), torch.device("cuda", 0)
    assert attention_kind(config, device) == kind
    assert what_auto_is(config, device) == kind + advice


@pytest.mark.parametrize(
    ("capability", "installed", "what"),
    [
        ((8, 0), flash.VERSION, "needs a Hopper GPU .* an A100"),
        ((9, 0), None, f"needs the package flash-attn-4 {flash.VERSION}\n"),
        ((9, 0), "4.0.0b1", f"needs the package flash-attn-4 {flash.VERSION}; 4.0.0b1 is installed"),
    ],
)
def test_flash_says_what_it_lacks(
    capability: tuple[int, int], installed: str | None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(flash, "_installed_version", lambda: installed)
    with pytest.raises(ConfigError, match=what):
        attention_kind(TrainConfig(attention="flash"), torch.device("cuda", 0))


def test_the_extra_installs_the_version_that_is_asked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["flash"]
    assert wanted == f"{flash.PACKAGE}[cu13]=={flash.VERSION}"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A library that is there and cannot be imported."""
    package = tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    for file in (package / "__init__.py", package / "cute" / "__init__.py"):
        file.touch()  # without them the real one, where it is installed, would come first
    (package / "cute" / "interface.py").write_text("import no_such_compiler")
    monkeypatch.syspath_prepend(str(tmp_path))
    there = [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
    for name in there:  # the real one, where it is installed and was used before
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_a_broken_library_is_named(broken: None, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not taken for a damaged checkpoint."""
    monkeypatch.setattr("train.model.attention_kind", lambda *_: "flash")
    with pytest.raises(ConfigError) as caught:
        load_language_model(ModelConfig(name_or_path=str(tiny)), TrainConfig(), CPU)
    assert caught.value.what == "flash-attn-4 is installed but cannot be imported: No module named 'no_such_compiler'"
    assert caught.value.do == flash.INSTALL


@pytest.mark.parametrize("kind", ["flash", "flex"])
def test_the_whole_model_needs_no_gpu_for_it(kind: str, tiny: Path) -> None:
    """Asking and merging give it no packs, on a machine that may have no GPU."""
    loaded = load_full_model(ModelConfig(name_or_path=str(tiny)), TrainConfig(attention=kind), CPU)  # type: ignore[arg-type]
    assert loaded.generate(input_ids=torch.tensor([[5, 6]]), max_new_tokens=2, pad_token_id=0).shape == (1, 4)


def test_another_block_mask_is_not_taken_for_a_packs() -> None:
    until = np.repeat([150, 256], [150, 106])
    moved = BlockLayout.of(until).block_mask(torch.from_numpy(until)).to("cpu")  # torch gives its own class back
    with pytest.raises(TypeError, match="no PackMask"):
        flash_packed_attention(torch.nn.Module(), *_states(256), moved, scaling=0.3)
