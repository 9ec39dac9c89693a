"""All stages of all samples in one pass, against walking them: a stage given those before it, a stock forward each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.features import features_on
from train.inputs import Inputs
from train.loss import pack_loss
from train.model import load_language_model
from train.stage_losses import StageLosses

from .conftest import Stock, job_of, under_adapter

CPU = torch.device("cpu")
MAX_PIXELS = 128 * 128
# Three questions on one image, which agree up to the question, up to the second stage, and as far as the image.
ROWS = [
    ("What is wrong?", [("observe", "A red spot.", 1.0), ("reason", "It is round.", 0.5), ("answer", "Stop.", 2.0)]),
    ("What is wrong?", [("observe", "A red spot.", 1.0), ("reason", "It is flat.", 0.5), ("answer", "Go.", 2.0)]),
    ("Who?", [("observe", "Two people.", 1.0), ("reason", "One waits.", 0.5), ("answer", "Both.", 2.0)]),
]


def _walked(stock: Stock, model: Any, image: Path) -> dict[str, list[float]]:
    """Backward through stage after stage; name -> [sum of weight * loss, sum of weights]."""
    found: dict[str, list[float]] = {}
    for question, stages in ROWS:
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        given = stock.inputs(messages, [image])
        given["input_ids"] = _followed_by(stock, given["input_ids"], "<|im_start|>assistant\n")
        for number, (name, target, weight) in enumerate(stages):
            last = number == len(stages) - 1
            before = given["input_ids"].shape[1]
            given["input_ids"] = _followed_by(stock, given["input_ids"], target + ("<|im_end|>" if last else "\n"))
            given["mm_token_type_ids"] = (given["input_ids"] == stock.model.config.image_token_id).int()
            logits = model(**given, use_cache=False).logits[0, before - 1 : -1]
            loss = cross_entropy(logits, given["input_ids"][0, before:], reduction="sum") * weight
            loss.backward()
            total = found.setdefault(name, [0.0, 0.0])
            total[0] += loss.item()
            total[1] += weight * len(logits)
    return found


def _followed_by(stock: Stock, ids: torch.Tensor, text: str) -> torch.Tensor:
    return torch.cat([ids, stock.tokenizer(text, return_tensors="pt")["input_ids"]], dim=1)


@pytest.mark.parametrize("tokens_per_pack", [1, 10**6])
def test_one_pass_is_the_walk_through_the_stages(
    tokens_per_pack: int, tiny: Path, pictures: list[Path], tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> None:
    rows = tmp_path / "train.jsonl"
    with rows.open("w") as file:
        for question, stages in ROWS:
            staged = [{"name": name, "target": target, "weight": weight} for name, target, weight in stages]
            row = {"image": f"images/{pictures[0].name}", "question": question, "stages": staged}
            file.write(json.dumps(row) + "\n")
    settings = {"tokens_per_pack": tokens_per_pack, "effective_batch_size": len(ROWS)}
    config = make_config({"train": str(rows)}, cache={"max_pixels": MAX_PIXELS}, train=settings)
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    inputs = Inputs.open(job_of(config))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    steps = inputs.steps(samples, config.train, shuffle=False)
    step = steps[0, 0]
    assert len(step.packs) == (3 if tokens_per_pack == 1 else 1)
    ours = under_adapter(load_language_model(config.model, config.train, CPU))
    features, stage_losses, loss = features_on(CPU, step.images, None), StageLosses(steps.stage_names, CPU), 0.0
    for pack in step.packs:
        losses = stage_losses.room(pack)
        part = pack_loss(ours, pack, features, losses=losses)
        part.backward()  # type: ignore[no-untyped-call]
        stage_losses.add(pack, losses)
        loss += part.item()

    stock = Stock.load(tiny, MAX_PIXELS)
    oracle = under_adapter(stock.model.requires_grad_(False))
    walked = _walked(stock, oracle, pictures[0])

    assert step.total_weight == sum(weight for _, weight in walked.values())
    assert loss == pytest.approx(sum(total for total, _ in walked.values()), rel=5e-6)
    wanted_means = {f"loss_{name}": total / weight for name, (total, weight) in walked.items()}
    assert stage_losses.take() == pytest.approx(wanted_means, rel=5e-6)
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in oracle.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        assert (found[name] - gradient).abs().max() <= 5e-5 * gradient.abs().max(), name
