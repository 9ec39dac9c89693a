"""The attention of packs by itself on a GPU: flex_attention and FlashAttention-4, their times and errors against fp32.

    python -m tests.benchmarks.attention_speed --out table.md

A layer of Qwen3-VL-8B (32 heads, 8 for keys and values, 128 a head, bfloat16), rows as training makes them: 4 images of
1304 tokens with 9 questions of 120 each, and 8 of 1424 with one. Random states; device events, medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from train.flash import flash_attention
from train.pack_mask import BLOCK_SIZE, BlockLayout, PackMask, dense_mask

ROUNDS, WARM_UP, QUEUED = 10, 3, 6
SCALE = 128**-0.5
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    compiled = torch.compile(flex_attention, dynamic=True)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "",
        "| row | kernels | forward ms | backward ms | error of the output | of query's, key's, value's gradients |",
        "|---|---|---|---|---|---|",
    ]
    for name, until in (("9 an image", forest(4, 1304, 9, 120)), ("1 an image", forest(8, 1424, 0, 0))):
        states = [torch.randn(1, len(until), heads, 128, device="cuda").transpose(1, 2) for heads in (32, 8, 8)]
        wanted = torch.randn(1, len(until), 32, 128, device="cuda")
        mask = BlockLayout.of(until).map_tensors("to", "cuda").block_mask(torch.from_numpy(until).cuda())
        right = _gradients(_dense(until), states, wanted, torch.float32)
        for kernels, attention in (("flex_attention", _flex(compiled, mask)), ("FlashAttention-4", _flash(mask))):
            errors = [_error(a, b) for a, b in zip(_gradients(attention, states, wanted), right, strict=True)]
            forward, backward = _times(attention, states, wanted)
            shown = " ".join(f"{error:.2e}" for error in errors[1:])
            lines.append(f"| {name} | {kernels} | {forward:.3f} | {backward:.3f} | {errors[0]:.2e} | {shown} |")
            print(lines[-1], flush=True)
    arguments.out.write_text("\n".join(lines) + "\n")


def forest(images: int, prefix: int, branches: int, length: int) -> npt.NDArray[np.int64]:
    """`visible_until` of a row: for each image a prefix, and branches that see it and themselves."""
    until: list[int] = []
    for _ in range(images):
        end = len(until) + prefix + branches * length
        until += [end] * prefix
        for _ in range(branches):
            until += [len(until) + length] * length
    filler = range(len(until), -(-len(until) // BLOCK_SIZE) * BLOCK_SIZE)
    return np.array([*until, *(place + 1 for place in filler)])


def _flex(compiled: Callable[..., torch.Tensor], mask: PackMask) -> Attention:
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True).transpose(1, 2)


def _flash(mask: PackMask) -> Attention:
    return lambda q, k, v: flash_attention(q, k, v, mask, SCALE)


def _dense(until: npt.NDArray[np.int64]) -> Attention:
    mask = dense_mask(torch.from_numpy(until).cuda())

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        heads = [
            scaled_dot_product_attention(
                q[:, [h]], k[:, [h // groups]], v[:, [h // groups]], attn_mask=mask, scale=SCALE
            )
            for h in range(q.shape[1])
        ]
        return torch.cat(heads, 1).transpose(1, 2)

    return attention


def _gradients(
    attention: Attention, states: list[torch.Tensor], wanted: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """Output and gradients; states and gradient are rounded to bfloat16 in any case."""
    rounded = [x.bfloat16().to(dtype).requires_grad_() for x in states]
    output = attention(*rounded)
    return [output.detach(), *torch.autograd.grad(output, rounded, wanted.bfloat16().to(dtype))]


def _error(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


def _times(attention: Attention, states: list[torch.Tensor], wanted: torch.Tensor) -> tuple[float, float]:
    """Forward and backward, of calls queued one behind the other, so that the host's part hides as in training."""
    given, gradient = [x.bfloat16().requires_grad_() for x in states], wanted.bfloat16()

    def forward() -> None:
        with torch.no_grad():
            attention(*given)

    def both() -> None:
        torch.autograd.grad(attention(*given), given, gradient)

    alone, together = _span(forward), _span(both)
    return alone, together - alone


def _span(call: Callable[[], None]) -> float:
    times = []
    for number in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(20_000_000)  # while it sleeps, the host queues all that is measured
        begin.record()
        for _ in range(QUEUED):
            call()
        end.record()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            times.append(begin.elapsed_time(end) / QUEUED)
    return statistics.median(times)


if __name__ == "__main__":
    main()
