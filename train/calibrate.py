"""`train.tokens_per_pack: auto`: rows of several lengths on a real step, with and without activation checkpointing.

The samples of a step stay the same whatever is chosen; only how many rows they are computed in changes. A trial runs
the two longest rows of the step, which decide what fits, and takes the others to be as fast a token: a whole step of
144 samples would take seconds, and a calibration minutes.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cache.atomic import write_text
from cache.errors import ResourceError
from cache.vision_tower import VisionTower
from train.loss import pack_loss
from train.on_device import Feeder
from train.pack import Pack
from train.recompute import recomputing
from train.step import Step
from train.step_dataset import CutStep, StepDataset

CALIBRATION_FILE = "calibration.json"
SHORTEST, GROWTH = 2048, 1.5
MEMORY_SHARE = 0.92  # the rest is for what differs from step to step
ROWS = 2  # while one is computed, what the next one needs is copied

logger = logging.getLogger("train")


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting, tried on one step.

    Attributes:
        seconds: forward and backward of the whole step, from those of its longest rows; infinite where they do not fit.
        peak_bytes: of the device's memory.
    """

    tokens_per_pack: int
    gradient_checkpointing: bool
    seconds: float
    peak_bytes: int


Try = Callable[[int, bool], Trial]


def choose(tokens_in_step: int, longest_sample: int, checkpointing: bool | None, attempt: Try) -> list[Trial]:
    """All trials, the fastest that fits first.

    Args:
        tokens_in_step: of this process's share of a step; a row that holds all of them needs no longer one.
        longest_sample: no row can be shorter.
        checkpointing: whether to recompute activations; None tries both.
        attempt: runs one trial.

    Raises:
        ResourceError: not even the shortest row fits.
    """
    trials: list[Trial] = []
    candidates = lengths(tokens_in_step, longest_sample)
    if not checkpointing:
        for tokens in candidates:
            trials.append(attempt(tokens, False))
            if math.isinf(trials[-1].seconds):
                break
    if checkpointing is not False:
        # What fits as it is could only take longer; and of what does not, the longest row repeats least.
        fits = max((t.tokens_per_pack for t in trials if math.isfinite(t.seconds)), default=0)
        for tokens in reversed([tokens for tokens in candidates if tokens > fits]):
            trials.append(attempt(tokens, True))
            if math.isfinite(trials[-1].seconds):
                break
    trials.sort(key=lambda t: t.seconds)
    if math.isinf(trials[0].seconds):
        raise ResourceError(
            f"the GPU's memory does not suffice for a row of {candidates[0]} tokens, which the longest sample "
            f"({longest_sample} tokens) needs",
            do="set train.quantization: nf4, lower cache.max_pixels, or use a larger GPU",
        )
    return trials


def lengths(tokens_in_step: int, longest_sample: int) -> list[int]:
    """Row lengths worth trying, from the shortest to that of a whole step: never one that the step could not fill."""
    tokens = max(SHORTEST, longest_sample)
    tried = [tokens]
    while tokens < tokens_in_step:
        tokens = min(int(tokens * GROWTH), tokens_in_step)
        tried.append(tokens)
    return tried


class Attempts:
    """Runs trials on a model. Leaves weights and random numbers as they were.

    Args:
        model: a PEFT model, ready for training.
        steps: the steps cut into rows of at most so many tokens.
        step: which (epoch, step) to run: the one with most tokens.
        autocast: as in training.
    """

    def __init__(
        self,
        model: Any,
        steps: Callable[[int], StepDataset],
        step: tuple[int, int],
        *,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]],
        tower: VisionTower | None = None,
    ) -> None:
        self._model, self._steps, self._step = model, steps, step
        self._device, self._autocast, self._tower = device, autocast, tower

    def __call__(self, tokens: int, recompute: bool) -> Trial:
        """Run one trial."""
        recomputing(self._model, recompute)
        self._model.train()
        steps = self._steps(tokens)
        rows, share = longest_rows(steps.cut(self._step))
        step = steps.read(rows)
        if self._device.type == "cuda":
            step = step.pin_memory()  # as in training
        _clean(self._model, self._device)  # or the peak would be that of loading the model
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            seconds, peak = self._measure(step)
        _clean(self._model, self._device)
        trial = Trial(tokens, recompute, slowest_process(seconds / share, self._device), peak)
        logger.info("calibration: %s", describe(trial))
        return trial

    def _measure(self, step: Step) -> tuple[float, int]:
        try:
            moments = self._moments()
            feeder = Feeder(self._device, self._tower)
            self._run(step, feeder)  # compiles
            retries = _alloc_retries(self._device)
            seconds = self._run(step, feeder)
        except (torch.OutOfMemoryError, ResourceError):  # the latter where the tower runs
            return math.inf, 0
        except RuntimeError as error:
            if "ALLOC_FAILED" not in str(error):  # cuBLAS's own word for it
                raise
            return math.inf, 0
        peak = torch.cuda.max_memory_allocated(self._device)
        total = torch.cuda.get_device_properties(self._device).total_memory
        limit = MEMORY_SHARE * total * torch.cuda.get_per_process_memory_fraction(self._device)
        # A second run finds all memory that it needs, unless it lies in pieces too small: with rows of other lengths
        # that would go on in every step.
        fits = peak <= limit and _alloc_retries(self._device) == retries
        del moments
        return (seconds if fits else math.inf), peak

    def _moments(self) -> torch.Tensor:
        """As much memory as the optimizer will take: two moments in fp32."""
        count = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        return torch.empty((2, count), dtype=torch.float32, device=self._device)

    def _run(self, step: Step, feeder: Feeder) -> float:
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        for pack, features in feeder.packs(step, following=step):  # in training, too, what comes is copied early
            with self._autocast():
                loss = pack_loss(self._model, pack, features, scale=1 / step.total_weight)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - started


def longest_rows(step: CutStep) -> tuple[CutStep, float]:
    """A step of the longest rows alone, with their images, and their share of its tokens."""
    packs = sorted(step.packs, key=_tokens, reverse=True)[:ROWS]
    share = sum(map(_tokens, packs)) / sum(map(_tokens, step.packs))
    places = {place: number for number, place in enumerate(dict.fromkeys(p for pack in packs for p in pack.images))}
    alone = tuple(replace(pack, images=tuple(places[place] for place in pack.images)) for pack in packs)
    return replace(step, packs=alone, images=tuple(step.images[place] for place in places)), share


def _tokens(pack: Pack) -> int:
    return pack.input_ids.shape[1]


def slowest_process(seconds: float, device: torch.device) -> float:
    """The longest time of all processes, so that each of them chooses the same."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    return float(slowest)


def describe(trial: Trial) -> str:
    """One line."""
    how = "with" if trial.gradient_checkpointing else "without"
    outcome = f"{trial.seconds:.3f} s a step, {trial.peak_bytes / 2**30:.1f} GiB"
    if math.isinf(trial.seconds):
        outcome = "does not fit"
    return f"rows of {trial.tokens_per_pack} tokens {how} activation checkpointing: {outcome}"


def read_calibration(folder: Path, made_for: dict[str, Any]) -> Trial | None:
    """What an earlier start of the same run chose on the same device."""
    try:
        content = json.loads((folder / CALIBRATION_FILE).read_text(encoding="utf-8"))
        same = content["made_for"] == json.loads(json.dumps(made_for))  # JSON knows no tuples
        return Trial(**content["chosen"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a new calibration costs a minute


def write_calibration(folder: Path, made_for: dict[str, Any], trials: Sequence[Trial]) -> None:
    """Keep the choice and all trials. `seconds` is null where a trial did not fit."""
    tried = [asdict(t) | {"seconds": t.seconds if math.isfinite(t.seconds) else None} for t in trials]
    content = {"chosen": tried[0], "made_for": made_for, "trials": tried}
    write_text(folder / CALIBRATION_FILE, json.dumps(content, indent=1))


def _alloc_retries(device: torch.device) -> int:
    """How often memory had to be given back and asked for anew."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def _clean(model: Any, device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
