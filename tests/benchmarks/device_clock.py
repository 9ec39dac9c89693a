"""Time and memory of work on a device. The CPU stands in where a benchmark is only tried (--tiny)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch


def milliseconds(device: torch.device, work: Callable[[], object]) -> float:
    """Of the device, from the first of its kernels to the last."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return 1000 * (time.perf_counter() - started)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def forget_peak(device: torch.device) -> None:
    """Begin to look for the largest amount of memory anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float | None:
    """The most that tensors took since then; not known of a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def clean(device: torch.device) -> None:
    """Leave nothing of one measurement to the next."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def cap_memory(device: torch.device, gib: float | None) -> None:
    """Let the allocator take no more than that, or all there is."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total) if gib else 1.0, device)
