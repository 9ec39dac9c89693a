"""Rates of training: samples and image tokens a second, share of time spent waiting for data, memory, time left."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch

from train.step import Step


class Throughput:
    """Counts between two log lines.

    The clock is the host's. A log line reads the loss back from the device, so over whole intervals host and device
    agree; within one the host may run ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples = self._image_tokens = self._tokens = self._steps = 0
        self._waited = 0.0
        self._since = time.perf_counter()
        self._seconds_per_step: float | None = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def count(self, step: Step) -> None:
        """One more step is under way."""
        self._steps += 1
        self._samples += step.num_samples
        self._image_tokens += step.num_image_tokens
        self._tokens += sum(pack.input_ids.shape[1] for pack in step.packs)

    def pause(self) -> None:
        """Leave out the time since the last report (an evaluation)."""
        self._since = time.perf_counter()
        self._waited = 0.0
        self._samples = self._image_tokens = self._tokens = self._steps = 0

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was spent on something else since the last report."""
        self._since += seconds

    def report(self, steps_left: int) -> dict[str, float]:
        """Rates since the last report, and the time left in seconds by a moving average of the time a step takes.

        `tokens_per_second` counts what this process computes: a shared prefix once.
        """
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        if self._steps:
            latest = seconds / self._steps
            before = self._seconds_per_step
            self._seconds_per_step = latest if before is None else 0.9 * before + 0.1 * latest
        rates = {
            "seconds": round(seconds, 3),
            "samples_per_second": round(self._samples / seconds, 3),
            "image_tokens_per_second": round(self._image_tokens / seconds, 1),
            "tokens_per_second": round(self._tokens / seconds, 1),
            "data_wait_share": round(self._waited / seconds, 4),
            "peak_memory_gib": round(self._peak_memory() / 2**30, 3),
            "seconds_left": round((self._seconds_per_step or 0.0) * steps_left, 1),
        }
        self.pause()
        return rates

    def _peak_memory(self) -> int:
        """Bytes: of the device where there is one, else of this process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilobytes * (1 if sys.platform == "darwin" else 1024)
