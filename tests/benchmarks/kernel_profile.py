"""On which kinds of kernels the device's time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

KINDS = {
    "flex_attention": ("flex",),
    # The compiler names its kernels after all that is fused in them, products and copies too.
    "compiled element-wise": ("triton_poi", "triton_red", "triton_per", "triton_for"),
    "FP8 products": ("e4m3", "qgmma", "f8f8", "_qqt"),
    "FlashAttention": ("flash",),
    "other products": ("triton_tem", "triton_mm", "gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "addmm"),
    "copies": ("memcpy", "memset", "copy"),
}
OTHER = "other"
LONGEST = 10


def profiled(device: torch.device, work: Callable[[], object]) -> dict[str, Any]:
    """`shared_out` of the kernels of one run of `work`; of torch's operators where the device is the CPU."""
    activity = torch.profiler.ProfilerActivity
    on_gpu = device.type == "cuda"
    with torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    events = profiler.key_averages()
    return shared_out((e.key, e.count, e.device_time_total if on_gpu else e.self_cpu_time_total) for e in events)


def shared_out(kernels: Iterable[tuple[str, int, float]]) -> dict[str, Any]:
    """Milliseconds in all, the share of each kind, and the longest kernels as [share, count, name].

    Args:
        kernels: name, how often it ran, microseconds of all its runs.
    """
    kernels = [kernel for kernel in kernels if kernel[2] > 0]
    total = sum(time for _, _, time in kernels)
    shares = dict.fromkeys([*KINDS, OTHER], 0.0)
    for name, _, time in kernels:
        shares[kind_of(name)] += time / total
    longest = sorted(kernels, key=lambda kernel: -kernel[2])[:LONGEST]
    return {
        "kernels_ms": total / 1000,
        "shares": shares,
        "longest": [[time / total, count, name[:100]] for name, count, time in longest],
    }


def kind_of(name: str) -> str:
    """The first kind, in the order of KINDS, of which the kernel's name has a word."""
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), OTHER)
