"""How much there is to do in each job of a chain: images of each part, tokens of each step, samples to evaluate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.build import CacheBuilder
from cache.dataset import read_split
from cache.errors import CacheError
from cache.fingerprint import expected_fingerprint
from cache.parts import part_of
from cache.plan import Plan
from cache.progress import Progress
from cache.remote import find_cache_at
from cache.split_images import SplitImage
from pipeline.config import PipelineConfig
from pipeline.options import job_of
from train.config import DEFAULT_TOKENS_PER_PACK, TrainConfig
from train.dataset import KnownImages, Samples
from train.inputs import Inputs
from train.run_folder import last_checkpoint

COUNTED_STEPS = 48  # of an epoch; counting a step takes as long as preparing it
_CONFIDENCE = 1.645  # 5 % on either side


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that the process with most of them computes in a step.

    Attributes:
        steps: of an epoch.
        spread: relative uncertainty of `mean`; 0 where every step of an epoch was counted.
    """

    steps: int
    mean: float
    spread: float


class Amounts:
    """Reads the dataset, once for each split, and image headers where an image is not cached yet. Loads no model."""

    def __init__(self, settings: PipelineConfig, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        self._plans: dict[str, Plan] = {}
        self._samples: dict[str, Samples] = {}
        self._tokens: dict[tuple[Any, ...], StepTokens] = {}
        self._records: dict[str, int] = {}

    def cache(self, split: str, num_parts: int, before: Sequence[str] = ()) -> dict[int, dict[str, float]]:
        """Part -> phases of the task that caches it, for the parts with work left.

        Args:
            before: splits that are cached first; images of theirs are read once more, but not encoded.
        """
        plan = self._plan(split)
        there = {image.key for other in before for image, _ in self._plan(other).todo}
        counts = Counter(dict.fromkeys((part_of(image.key, num_parts) for image, _ in plan.todo), 0))
        counts.update(part_of(image.key, num_parts) for image, _ in plan.todo if image.key not in there)
        paths = len({image.path for image in plan.images} | plan.refused.keys())
        return {part: {"reading": paths, "encoding": float(count)} for part, count in sorted(counts.items())}

    def images(self, split: str) -> int:
        """That are not cached yet."""
        return len(self._plan(split).todo)

    def records(self, settings: PipelineConfig, split: str) -> int:
        """Usable rows of a split."""
        key = self._key(settings, split)
        if key not in self._records:
            self._records[key] = len(read_split(settings.data, split).records)
        return self._records[key]

    def evaluation(self, settings: PipelineConfig, split: str, limit: int | None) -> dict[str, float]:
        """Phases of an evaluation."""
        count = float(self.records(settings, split))
        return {"tokenizing": 2 * count, "computing": count, "generating": min(count, limit or count)}

    def training(
        self,
        settings: PipelineConfig,
        *,
        processes: int,
        tokens_per_pack: int | None = None,
        length: Mapping[str, float] | None = None,
    ) -> tuple[dict[str, float], float]:
        """Phases of what is left of a training run, and the relative uncertainty of its tokens.

        Args:
            tokens_per_pack: None for what is set.
            length: other values of num_train_epochs or max_steps.
        """
        train = settings.train.model_copy(update=dict(length or {}))
        tokens = self.step_tokens(settings, processes, tokens_per_pack)
        steps = total_steps(train, tokens.steps)
        checkpoint = last_checkpoint(settings.output_dir) if train.resume else None
        done = min(steps, int(checkpoint.name.rpartition("-")[2])) if checkpoint is not None else 0
        work = {"tokenizing": float(self.records(settings, train.split)), "tokens": (steps - done) * tokens.mean}
        work["saving"] = float(_occasions(train.save_steps, tokens.steps, done, steps))
        if train.eval_split is not None and train.eval_split in settings.data.splits:
            held_out = self.records(settings, train.eval_split)
            work["tokenizing"] += held_out
            work["evaluating"] = float(_occasions(train.eval_steps, tokens.steps, done, steps) * held_out)
        return work, tokens.spread

    def step_tokens(self, settings: PipelineConfig, processes: int, tokens_per_pack: int | None) -> StepTokens:
        """See StepTokens."""
        train = settings.train
        budget = tokens_per_pack or (
            train.tokens_per_pack if train.tokens_per_pack != "auto" else DEFAULT_TOKENS_PER_PACK
        )
        key = (
            self._key(settings, train.split),
            *(train.effective_batch_size, train.order, train.seed, train.share_prefixes),
            *(budget, processes),
        )
        if key not in self._tokens:
            self._tokens[key] = self._count(settings, budget, processes)
        return self._tokens[key]

    def _count(self, settings: PipelineConfig, budget: int, processes: int) -> StepTokens:
        inputs = self._inputs(settings)
        config = settings.train.model_copy(update={"tokens_per_pack": budget})
        steps = inputs.steps(self._of(settings, inputs), config, shuffle=True, world_size=processes)
        count = len(steps)
        looked = sorted({count * place // COUNTED_STEPS for place in range(COUNTED_STEPS)})
        self._progress.start("counting tokens of steps", len(looked), "step")
        tokens = []
        for step in looked:
            tokens.append(steps.tokens_in_step(0, step))
            self._progress.advance()
        self._progress.finish()
        mean = float(np.mean(tokens))
        whole = len(looked) == count
        spread = 0.0 if whole else _CONFIDENCE * float(np.std(tokens, ddof=1)) / math.sqrt(len(tokens)) / mean
        return StepTokens(count, mean, spread)

    def _inputs(self, settings: PipelineConfig) -> Inputs:
        # Not from the cache: it may not be there yet, and no feature is read here.
        return Inputs.open(job_of(settings, from_cache=False))

    def _of(self, settings: PipelineConfig, inputs: Inputs) -> Samples:
        split = settings.train.split
        key = self._key(settings, split)
        if key not in self._samples:
            known = self._known(split)
            self._samples[key] = inputs.samples.training(split, lambda _: known, self._progress)
        return self._samples[key]

    def _known(self, split: str) -> KnownImages:
        s = self._settings
        try:
            cache = find_cache_at(
                s.cache_source,
                expected_fingerprint(s.model, s.cache),
                any_backend=s.cache.image_processor_backend == "auto",
            )
            return KnownImages.of(cache.split(split))
        except CacheError:
            if not isinstance(s.cache_source, str):
                plan = self._plan(split)
                return KnownImages(_grids(plan.images), plan.refused)
            raise

    def _plan(self, split: str) -> Plan:
        if split not in self._plans:
            s = self._settings
            self._plans[split] = CacheBuilder(s.model, s.data, s.cache, s.cache_dir).plan(split, self._progress)
        return self._plans[split]

    @staticmethod
    def _key(settings: PipelineConfig, split: str) -> str:
        return f"{split}\n{settings.data.model_dump_json()}"


def total_steps(train: TrainConfig, steps_per_epoch: int) -> int:
    """Of a run, as transformers counts them."""
    return train.max_steps if train.max_steps > 0 else math.ceil(train.num_train_epochs * steps_per_epoch)


def _occasions(every: int | None, epoch: int, done: int, steps: int) -> int:
    """How often something comes that comes every so many steps, or at the end of each epoch, begun ones included."""
    if every is not None:
        return steps // every - done // every
    return max(0, math.ceil(steps / epoch) - done // epoch)


def _grids(images: list[SplitImage]) -> dict[str, tuple[str, tuple[int, int, int]]]:
    return {image.path: (image.key, image.image_grid_thw) for image in images}
