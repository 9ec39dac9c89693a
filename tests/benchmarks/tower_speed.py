"""The vision tower alone at the 8B's true shapes: milliseconds an image, and the error against the tower in fp32.

    python -m tests.benchmarks.tower_speed --out table.md
    python -m tests.benchmarks.tower_speed --variants stock,fast,fast-flash --batches 1,8
    python -m tests.benchmarks.tower_speed --tiny        # on a CPU, to try the command

Images of 5120 patches (1036x1288), random weights and pixels, bfloat16. Device events around one call of
`VisionTower.encode` each, medians; "queued" is the same for calls that are queued one behind the other, as the cache
stage does it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cache.fast_tower import FastTower
from cache.vision_tower import VisionTower
from tests.benchmarks.device_clock import milliseconds
from tests.benchmarks.true_tower import make_tower

WARM_UP, ROUNDS = 3, 8
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "fast": {},
    "fast-flash": {"flash": True},
    "fast-plain-gelu": {"fused_gelu": False},
}
TINY = Qwen3VLVisionConfig(
    depth=3,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    out_hidden_size=32,
    deepstack_visual_indexes=[0, 1],
    num_position_embeddings=64,
    patch_size=16,
)


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="stock,fast,fast-plain-gelu", help=f"Of {', '.join(VARIANTS)}.")
    parser.add_argument("--batches", default="1,4,8,16", help="Images at once; stock is measured at 1 and 8 of them.")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    if arguments.tiny:
        torch.compiler.set_stance("force_eager")  # there may be no compiler
    lines = measure(
        arguments.variants.split(","), [int(n) for n in arguments.batches.split(",")], device, tiny=arguments.tiny
    )
    print("\n".join(lines))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


def measure(variants: list[str], batches: list[int], device: str, *, tiny: bool) -> list[str]:
    """The table as Markdown."""
    import transformers

    name = "CPU" if tiny else torch.cuda.get_device_name()
    grid = torch.tensor([1, 4, 6] if tiny else [1, 64, 80])
    generator = torch.Generator(device).manual_seed(0)
    images = [
        torch.randn(int(grid.prod()), 1536, device=device, generator=generator).to(torch.bfloat16)
        for _ in range(max(batches))
    ]
    exact = _exact(images[0], grid, device, tiny=tiny)
    lines = [
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}; {int(grid.prod())} patches an "
        f"image, bf16, medians of {ROUNDS}.",
        "",
        "| variant | images at once | ms an image | queued | first call, s | error of image_embeds | of DeepStack |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        tower = _tower(variant, device, tiny=tiny)
        for count in batches:
            if variant == "stock" and count not in (1, 8):
                continue
            lines.append(f"| {variant} | {count} | {_row(tower, images[:count], grid, exact)} |")
            print(lines[-1], flush=True)
        del tower
    return lines


def _row(tower: VisionTower, images: list[torch.Tensor], grid: torch.Tensor, exact: list[torch.Tensor]) -> str:
    grids = [grid] * len(images)
    started = time.perf_counter()
    first = tower.encode(images, grids)[0]
    _wait(tower.device)
    compiling = time.perf_counter() - started
    errors = [_error(one, other) for one, other in zip(first_tensors(first), exact, strict=True)]

    def call() -> None:
        tower.encode(images, grids)

    alone, queued = _milliseconds(call, tower.device), _queued_milliseconds(call, tower.device)
    return (
        f"{alone / len(images):.2f} | {queued / len(images):.2f} | {compiling:.1f} | {errors[0]:.3g} | {errors[1]:.3g}"
    )


def first_tensors(features: Any) -> list[torch.Tensor]:
    """Main level and DeepStack levels of an image."""
    return [features.image_embeds, features.deepstack_features]


def _tower(variant: str, device: str, *, tiny: bool) -> VisionTower:
    module, options = _module(device, torch.bfloat16, tiny=tiny), VARIANTS[variant]
    return VisionTower(module, fast=None if options is None else FastTower(module, **options))


def _module(device: str, dtype: torch.dtype, *, tiny: bool) -> torch.nn.Module:
    if not tiny:
        return make_tower(device, dtype=dtype)
    torch.manual_seed(0)
    module: torch.nn.Module = Qwen3VLVisionModel._from_config(TINY, dtype=dtype)
    return module


def _exact(image: torch.Tensor, grid: torch.Tensor, device: str, *, tiny: bool) -> list[torch.Tensor]:
    """What the stock tower gives in fp32 with the bfloat16 weights."""
    wide = _module(device, torch.float32, tiny=tiny)
    wide.load_state_dict(_module(device, torch.bfloat16, tiny=tiny).state_dict())
    found = first_tensors(VisionTower(wide).encode([image.float()], [grid])[0])
    del wide
    return found


def _error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def _milliseconds(call: Callable[[], None], device: torch.device) -> float:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        times.append(milliseconds(device, call))
    return statistics.median(times)


def _queued_milliseconds(call: Callable[[], None], device: torch.device) -> float:
    """Of a call when there is always another one behind it."""

    def several() -> None:
        for _ in range(ROUNDS):
            call()

    _wait(device)
    return milliseconds(device, several) / ROUNDS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
