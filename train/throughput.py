"""Rates of training: samples and image tokens a second, share of time spent waiting for data, memory, time left."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from train.step import Step

ALLOC_RETRIES = "alloc_retries"


@dataclass
class _Counted:
    """What was done in a stretch of time."""

    steps: int = 0
    samples: int = 0
    image_tokens: int = 0
    tokens: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    def without(self, part: _Counted) -> _Counted:
        """The rest of it."""
        return _Counted(**{name: getattr(self, name) - getattr(part, name) for name in vars(self)})


class Throughput:
    """Counts between two log lines.

    The clock is the host's. A log line reads the loss back from the device, so over whole intervals host and device
    agree; within one the host may run ahead. The first step of a process compiles and warms up: it is left out of the
    rates, except in a line of its own, which has nothing else to tell, and no time left then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = _Counted()
        self._first: _Counted | None = None
        self._first_is_told = False
        self._since = time.perf_counter()
        self._seconds_per_step = 0.0
        self._reports = 0
        self._retries = self._retries_so_far() if device.type == "cuda" else 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent inside counts as waiting for data."""
        started = time.perf_counter()
        yield
        self._now.waited += time.perf_counter() - started

    def count(self, step: Step) -> None:
        """One more step is under way."""
        self._now.steps += 1
        self._now.samples += step.num_samples
        self._now.image_tokens += step.num_image_tokens
        self._now.tokens += sum(pack.input_ids.shape[1] for pack in step.packs)
        if self._first is None:
            self._first = replace(self._now, seconds=time.perf_counter() - self._since)

    def pause(self) -> None:
        """Leave out the time since the last report (an evaluation)."""
        self._since = time.perf_counter()
        self._now = _Counted()
        self._first_is_told = self._first is not None

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was spent on something else since the last report."""
        self._since += seconds

    def report(self, steps_left: int) -> dict[str, float]:
        """Rates since the last report, and the time left in seconds by a moving average of the time a step takes.

        `tokens_per_second` counts what this process computes: a shared prefix once. `seconds_left` is missing as long
        as nothing but the first step was timed.
        """
        found = replace(self._now, seconds=time.perf_counter() - self._since)
        warming_up = self._first is not None and not self._first_is_told
        if self._first is not None and warming_up and found.steps > 1:
            found, warming_up = found.without(self._first), False
        seconds = max(found.seconds, 1e-9)
        if found.steps and not warming_up:
            self._reports += 1
            # A plain mean at first, so that one slow step among the first ones is soon outweighed.
            share = max(0.1, 1 / self._reports)
            self._seconds_per_step += share * (seconds / found.steps - self._seconds_per_step)
        rates = {
            "seconds": round(seconds, 3),
            "samples_per_second": round(found.samples / seconds, 3),
            "image_tokens_per_second": round(found.image_tokens / seconds, 1),
            "tokens_per_second": round(found.tokens / seconds, 1),
            "data_wait_share": round(found.waited / seconds, 4),
            **self._memory(),
        }
        if self._reports:
            rates["seconds_left"] = round(self._seconds_per_step * steps_left, 1)
        self.pause()
        return rates

    def _memory(self) -> dict[str, float]:
        """GiB at most, of the GPU where there is one, else of this process. Of a GPU, if that was so since the last
        report, how often its memory was full of what torch had kept for later, and had to be given back and asked for
        anew, for which host and GPU wait."""
        if self._device.type != "cuda":
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return {"peak_memory_gib": round(kilobytes * (1 if sys.platform == "darwin" else 1024) / 2**30, 3)}
        so_far = self._retries_so_far()
        retries, self._retries = so_far - self._retries, so_far
        peak = {"peak_memory_gib": round(torch.cuda.max_memory_allocated(self._device) / 2**30, 3)}
        return peak | ({ALLOC_RETRIES: retries} if retries else {})

    def _retries_so_far(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
