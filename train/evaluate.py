"""Evaluation of a split: loss at targets, and answers generated from cached features."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cache.progress import Progress
from cache.records import Image, Record
from cache.vision_tower import VisionTower
from train.chat import ChatEncoder
from train.config import EvalConfig
from train.dataset import Samples
from train.features import FeatureSource, features_on
from train.generate import generate
from train.loss import pack_loss
from train.metrics import answer_of, exact_match, summarize
from train.on_device import Feeder
from train.sample import widen
from train.stage_losses import StageLosses
from train.step import Step

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One generated answer; a line of predictions.jsonl."""

    id: str
    images: list[str]
    question: str
    answer: str
    prediction: str
    exact_match: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores over a split and the predictions behind them."""

    scores: dict[str, float]
    predictions: list[Prediction]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Generates answers and scores them.

    Attributes:
        source: reads features, or pixels for `tower`.
    """

    encoder: ChatEncoder
    source: FeatureSource
    merge_size: int
    config: EvalConfig
    tower: VisionTower | None = None

    def run(
        self, model: Any, prompts: Samples, progress: Progress, *, rank: int = 0, world_size: int = 1
    ) -> Evaluation:
        """Answer the last turn of every record.

        Args:
            prompts: from SampleBuilder.prompts.
            rank, world_size: of this process. The processes divide the batches, which are those of one process, and
                exchange the answers; each returns all of them. Every process must call this.
        """
        model.eval()
        count = min(len(prompts.samples), self.config.limit or len(prompts.samples))
        # Alike lengths together: less padding. The order of the output is the dataset's.
        order = sorted(range(count), key=lambda index: prompts.samples[index].num_tokens)
        texts: dict[int, str] = {}
        batches = [order[start : start + self.config.batch_size] for start in range(0, count, self.config.batch_size)]
        mine = batches[rank::world_size]
        progress.start("generating answers", sum(map(len, mine)), "sample")
        for batch in mine:
            texts |= dict(zip(batch, self._generate(model, prompts, batch), strict=True))
            progress.advance(len(batch))
        progress.finish()
        if world_size > 1:
            texts = _of_all(texts, world_size)
        predictions = [_prediction(prompts.records[index], texts[index]) for index in range(count)]
        scores = summarize(
            [p.prediction for p in predictions],
            [p.answer for p in predictions],
            point_distance=self.config.point_distance,
        )
        return Evaluation(scores, predictions)

    def _generate(self, model: Any, prompts: Samples, batch: list[int]) -> list[str]:
        samples = [prompts.samples[index] for index in batch]
        distinct = {image.key: image for sample in samples for image in sample.images}
        device = next(model.parameters()).device
        loaded = features_on(device, [self.source.load(image) for image in distinct.values()], self.tower)
        features = dict(zip(distinct, loaded, strict=True))
        token = self.encoder.image_token_id
        return generate(
            model,
            self.encoder.tokenizer,
            [widen(sample, image_token_id=token, merge_size=self.merge_size) for sample in samples],
            [features[image.key] for sample in samples for image in sample.images],
            image_token_id=token,
            max_new_tokens=self.config.max_new_tokens,
        )


def _of_all(texts: dict[int, str], world_size: int) -> dict[int, str]:
    """The answers of all processes."""
    shares: list[dict[int, str]] = [{} for _ in range(world_size)]
    torch.distributed.all_gather_object(shares, texts)
    return {index: text for share in shares for index, text in share.items()}


@torch.no_grad()
def weighted_loss(
    model: Any,
    steps: Iterable[Step],
    device: torch.device,
    tower: VisionTower | None,
    context: Context,
    stages: StageLosses,
) -> torch.Tensor:
    """(2,) float64: sum of weight * cross-entropy, and sum of weights, over some steps.

    Args:
        stages: counts the packs too.
    """
    model.eval()
    totals = torch.zeros(2, device=device, dtype=torch.float64)
    feeder = Feeder(device, tower)
    for step in steps:
        for pack, features in feeder.packs(step):
            losses = stages.room(pack)
            with context():
                totals[0] += pack_loss(model, pack, features, losses=losses)
            stages.add(pack, losses)
            totals[1] += pack.target_weights.sum()
    return totals


def _prediction(record: Record, prediction: str) -> Prediction:
    answer = answer_of(record)
    asked = [turn for turn in record.turns if turn.role == "user"][-1:]
    question = "".join("<image>" if isinstance(part, Image) else part.text for turn in asked for part in turn.content)
    return Prediction(
        id=record.record_id,
        images=[ref.path for ref in record.images],
        question=question,
        answer=answer,
        prediction=prediction,
        exact_match=exact_match(prediction, answer),
    )
