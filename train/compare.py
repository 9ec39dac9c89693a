"""What the cache says against what the tower says now: error of the features, and what the answers make of it."""

from __future__ import annotations

import gc
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from cache.errors import DataError
from cache.features import VisionFeatures
from cache.image_processor_choice import require_gpu
from cache.keys import image_key
from cache.manifest import Manifest
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.reader import FeatureCache
from cache.vision_tower import VisionTower, resolve_device
from train.adapter import NO_ADAPTER
from train.adapter_settings import require_usable
from train.dataset import Samples
from train.features import CachedImage, CachedSource, FeatureSource, LiveSource, StepImage, features_on
from train.inputs import Inputs
from train.job import Job
from train.lora import load_adapter
from train.loss import pack_logits
from train.model import autocast, load_language_model, training_device
from train.sample import Sample, SampleImage
from train.step import Step

_ROWS = 64  # of the vocabulary's width, in float64 at a time


@dataclass(frozen=True, slots=True)
class LevelError:
    """||cached - live|| / ||live|| of one level, Frobenius norms: over all images together, and of the worst image."""

    name: str
    overall: float
    worst: float


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """One record, in the language model fed with cached and with live features.

    Attributes:
        live_loss, cached_loss: weighted means of the cross-entropy over the record's targets, in nats a token.
        divergences: KL(live || cached) of each target's distribution, in nats.
        turned: targets whose most likely token is another one.
    """

    live_loss: float
    cached_loss: float
    divergences: tuple[float, ...]
    turned: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome. `answers` is empty when no records were asked for."""

    where: str
    storage: str
    num_images: int
    levels: tuple[LevelError, ...]
    answers: tuple[AnswerChange, ...]

    def describe(self) -> str:
        """In lines for a person."""
        lines = [f"cached ({self.storage}) against live: {self.num_images} images, {len(self.answers)} records"]
        lines += [
            f"  {level.name:14s} relative error {level.overall:.3g}, of the worst image {level.worst:.3g}"
            for level in self.levels
        ]
        if self.answers:
            changes = [answer.cached_loss - answer.live_loss for answer in self.answers]
            divergences = [value for answer in self.answers for value in answer.divergences]
            live = sum(answer.live_loss for answer in self.answers) / len(changes)
            turned = sum(answer.turned for answer in self.answers)
            lines += [
                f"  {'loss':14s} live {live:.6g}, cached {sum(changes) / len(changes):+.3g}; "
                f"of one record at most {max(map(abs, changes)):.3g}",
                f"  {'KL divergence':14s} mean {sum(divergences) / len(divergences):.3g} nats, largest "
                f"{max(divergences):.3g}, over {len(divergences)} answer tokens",
                f"  {'first choice':14s} another token at {turned} of {len(divergences)} answer tokens",
            ]
        return "\n".join([*lines, f"  cache          {self.where}"])


def compare_with_live(
    job: Job, split: str, images: int, records: int, progress: Progress, *, adapter: Path | None = None
) -> Comparison:
    """Encode a sample of a split's images again and compare them, and what the language model makes of them.

    The samples are drawn with `train.seed`. The tower is gone before the language model is loaded; in between the live
    features of the sampled records' images are held on the host (40 MiB for one of 1036x1288 at the 8B's shapes).

    Args:
        job: `from_cache` is not looked at.
        images: distinct images for the error of the features; all there are if these are fewer.
        records: for loss and divergence, among those with an image; 0 leaves the language model out.
        adapter: a trained adapter for the language model; None for the bare model.

    Raises:
        CacheError: the split is not cached for this configuration, or an entry is damaged.
        DataError: the split has no image, or an image file is missing or has changed since it was cached.
    """
    inputs = Inputs.open(replace(job, from_cache=True))
    if inputs.cache is None:
        raise TypeError("a job that reads the cache has none")
    samples = inputs.samples.training(split, inputs.known(split, progress), progress)
    chosen, some = _choose(samples, split, images, records, job.train.seed)
    wanted = {image.key: image for image in (*chosen, *(image for sample in some for image in sample.images))}
    live = _encode(job, inputs.cache.manifest, list(wanted.values()), progress)
    errors = _Errors(inputs.cache.manifest.num_deepstack_levels)
    for image in chosen:
        errors.add(inputs.cache.read(image.key), live[image.key])
    answers = _answers(job, inputs, inputs.cache, some, live, adapter, progress) if some else ()
    storage = str(inputs.cache.manifest.stored_dtype).removeprefix("torch.")
    return Comparison(inputs.cache.files.where, storage, len(chosen), errors.levels(), answers)


def _choose(
    samples: Samples, split: str, images: int, records: int, seed: int
) -> tuple[list[SampleImage], list[Sample]]:
    distinct = {image.key: image for sample in samples.samples for image in sample.images}
    if not distinct:
        raise DataError(
            "no record of the split has an image", where=f"data.splits.{split}", do="name a split that has images"
        )
    generator = random.Random(seed)  # noqa: S311  (a sample, no secret)
    keys = generator.sample(sorted(distinct), min(images, len(distinct)))
    about_images = [sample for sample in samples.samples if sample.images]
    return [distinct[key] for key in keys], generator.sample(about_images, min(records, len(about_images)))


def _encode(
    job: Job, manifest: Manifest, images: Sequence[SampleImage], progress: Progress
) -> dict[str, VisionFeatures]:
    """Key -> live features on the host, made as the cache stage makes them, by the image processor that it had."""
    require_gpu(job.cache.image_processor_device, resolve_device(job.cache.device))
    settings = job.cache.model_copy(update={"image_processor_backend": manifest.fingerprint["processor.backend"]})
    source = LiveSource(ImageProcessor.from_checkpoint(job.model, settings), job.cache.max_image_pixels)
    tower = VisionTower.load(job.model, job.cache)
    found = {}
    progress.start("encoding images again", len(images), "image")
    for image in images:
        if image_key(image.ref.read()) != image.key:
            raise DataError(
                "the image has changed since it was cached",
                where=image.ref.path,
                do="run `pipeline cache` for this split again",
            )
        (features,) = features_on(tower.device, [source.load(image)], tower)
        found[image.key] = VisionFeatures(
            features.image_embeds.cpu(), features.deepstack_features.cpu(), features.image_grid_thw
        )
        progress.advance()
    progress.finish()
    del tower
    _release_device()
    return found


class _Errors:
    """Adds up squared norms a level, in float64."""

    def __init__(self, num_deepstack_levels: int) -> None:
        self._names = ["main", *(f"deepstack.{level}" for level in range(num_deepstack_levels))]
        self._squares: list[list[tuple[float, float]]] = [[] for _ in self._names]

    def add(self, cached: VisionFeatures, live: VisionFeatures) -> None:
        """One image."""
        pairs = [(cached.image_embeds, live.image_embeds)]
        pairs += zip(cached.deepstack_features, live.deepstack_features, strict=True)
        for squares, (one, other) in zip(self._squares, pairs, strict=True):
            exact = other.double()
            squares.append((float((one.double() - exact).square().sum()), float(exact.square().sum())))

    def levels(self) -> tuple[LevelError, ...]:
        """Of everything that was added."""
        return tuple(
            LevelError(
                name,
                _relative(sum(error for error, _ in squares), sum(norm for _, norm in squares)),
                max((_relative(error, norm) for error, norm in squares), default=0.0),
            )
            for name, squares in zip(self._names, self._squares, strict=True)
        )


def _relative(error: float, norm: float) -> float:
    """Root of the ratio; 0 where nothing differs, also from nothing."""
    if error == 0:
        return 0.0
    return (error / norm) ** 0.5 if norm else float("inf")


@dataclass(frozen=True, slots=True)
class _Held(FeatureSource):
    """Features that are in memory already."""

    features: Mapping[str, VisionFeatures]
    bytes_per_token: int = 0  # nothing is loaded

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        held = self.features[image.key]
        return CachedImage(held, held.image_embeds.dtype)


@torch.no_grad()
def _answers(
    job: Job,
    inputs: Inputs,
    cache: FeatureCache,
    samples: Sequence[Sample],
    live: Mapping[str, VisionFeatures],
    adapter: Path | None,
    progress: Progress,
) -> tuple[AnswerChange, ...]:
    """Each record in a batch of its own, once with live and once with cached features."""
    if adapter is not None:
        require_usable(adapter, job.train.quantization, NO_ADAPTER)
    device = training_device(job.train)
    model = load_adapter(load_language_model(job.model, job.train, device), adapter).eval()
    config = job.train.model_copy(update={"effective_batch_size": 1})
    chosen = Samples(list(samples), [], [])
    sources: tuple[FeatureSource, FeatureSource] = (_Held(live), CachedSource(cache))
    of_live, of_cached = (replace(inputs, source=source).steps(chosen, config, shuffle=False) for source in sources)
    found = []
    progress.start("comparing answers", len(samples), "record")
    for number in range(len(samples)):
        step = of_live[0, number]
        with autocast(job.train, device):
            one, other = _logits(model, step, device), _logits(model, of_cached[0, number], device)
        (pack,) = step.packs
        found.append(_change(one, other, pack.target_ids.to(device), pack.target_weights.to(device)))
        progress.advance()
    progress.finish()
    del model
    _release_device()
    return tuple(found)


def _logits(model: Any, step: Step, device: torch.device) -> torch.Tensor:
    """(T, V) of a step of one record."""
    (pack,) = step.packs
    return pack_logits(model, pack.map_tensors("to", device), features_on(device, step.images, None))


def _change(live: torch.Tensor, cached: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> AnswerChange:
    """From (T, V) logits; KL(p || q) = sum p (log p - log q), Kullback and Leibler 1951."""
    losses = [(cross_entropy(x.float(), targets, reduction="none") * weights).sum() for x in (live, cached)]
    total = weights.sum()
    divergences: list[float] = []
    for start in range(0, len(live), _ROWS):
        p, q = (logits[start : start + _ROWS].double().log_softmax(-1) for logits in (live, cached))
        divergences += (p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()
    turned = int((live.argmax(-1) != cached.argmax(-1)).sum())
    return AnswerChange(float(losses[0] / total), float(losses[1] / total), tuple(divergences), turned)


def _release_device() -> None:
    """Give back what the model that was just dropped held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
