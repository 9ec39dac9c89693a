"""Cached features in the stock class without its tower against the stock model fed with pixels: the same bits."""

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
from train.features import LiveSource, features_on
from train.inputs import Inputs, load_tower
from train.loss import pack_logits, pack_loss
from train.model import load_language_model, mm_encoder_outputs

from .conftest import Stock, job_of, under_adapter

MAX_PIXELS = 128 * 128
CPU = torch.device("cpu")

CASES: dict[str, tuple[list[int], str]] = {
    "one image": ([0], "<image>What is it?"),
    "several images": ([0, 1, 2], "<image><image>Compare them with <image>."),
    "image behind the question": ([1], "What is it?\n<image>"),
    "two images of different shapes": ([0, 2], "<image> or <image>?"),
    "the same image twice": ([2, 2], "<image>again<image>"),
    "text only": ([], "What colour is the sky?"),
}


def _messages(question: str, answer: str) -> list[dict[str, Any]]:
    content: list[dict[str, str]] = []
    for number, piece in enumerate(question.split("<image>")):
        content += [{"type": "image"}] if number else []
        content += [{"type": "text", "text": piece}] if piece else []
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def _lora_gradients(model: Any) -> dict[str, torch.Tensor]:
    return {
        name.replace("base_model.model.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


@pytest.fixture(params=["dense", "moe"])
def checkpoint(request: pytest.FixtureRequest, tiny: Path, tiny_moe: Path) -> Path:
    return {"dense": tiny, "moe": tiny_moe}[request.param]


@pytest.mark.parametrize("case", CASES)
def test_cached_equals_stock_bit_for_bit(
    case: str, checkpoint: Path, pictures: list[Path], tmp_path: Path, make_config: Callable[..., PipelineConfig]
) -> None:
    which, question = CASES[case]
    images = [pictures[i] for i in which]
    rows = tmp_path / "train.jsonl"
    rows.write_text(
        json.dumps({"image": [f"images/{i.name}" for i in images], "question": question, "answer": "Blue."}) + "\n"
    )
    config = make_config({"train": str(rows)}, model=str(checkpoint), cache={"max_pixels": MAX_PIXELS})
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    inputs = Inputs.open(job_of(config, from_cache=True))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    step = inputs.steps(samples, config.train, shuffle=False)[0, 0]
    (pack,) = step.packs
    features = features_on(CPU, step.images, None)

    stock = Stock.load(checkpoint, MAX_PIXELS)
    oracle_inputs = stock.inputs(_messages(question, "Blue."), images)
    assert torch.equal(pack.input_ids, oracle_inputs["input_ids"])
    answer = stock.answer_mask(_messages(question, "Blue."), oracle_inputs["input_ids"])
    assert pack.target_positions.tolist() == (answer.nonzero()[:, 0] - 1).tolist()

    oracle = under_adapter(stock.model.requires_grad_(False))
    expected = oracle(**oracle_inputs, use_cache=False).logits
    cross_entropy(expected[0, pack.target_positions], pack.target_ids).backward()

    ours = under_adapter(load_language_model(config.model, config.train, CPU))
    assert ours.model.model.visual is None
    got = ours(
        input_ids=pack.input_ids,
        position_ids=pack.position_ids,
        mm_encoder_outputs=mm_encoder_outputs([features[place] for place in pack.images]),
        use_cache=False,
    ).logits
    cross_entropy(got[0, pack.target_positions], pack.target_ids).backward()

    assert torch.equal(got, expected)
    gradients, wanted = _lora_gradients(ours), _lora_gradients(oracle)
    assert gradients.keys() == wanted.keys()
    assert len(gradients) > 0
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradients[name], gradient), name
    # The way training goes projects at targets only; that changes the shape of one product, not what is computed.
    torch.testing.assert_close(pack_logits(ours, pack, features), got[0, pack.target_positions], rtol=1e-5, atol=1e-6)


def test_cached_equals_live_bit_for_bit(tiny: Path, data_dir: Path, make_config: Callable[..., PipelineConfig]) -> None:
    """Our two paths, whole packs of several samples and images: same loss and gradients to the bit."""
    config = make_config({"train": str(data_dir / "sharegpt.json")})
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    outcome = []
    for from_cache in (True, False):
        job = job_of(config, from_cache=from_cache)
        inputs = Inputs.open(job)
        samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
        assert isinstance(inputs.source, LiveSource) != from_cache
        step = inputs.steps(samples, config.train, shuffle=True)[0, 0]
        model = under_adapter(load_language_model(config.model, config.train, CPU))
        features = features_on(CPU, step.images, None if from_cache else load_tower(job, CPU))
        losses = [pack_loss(model, pack, features) for pack in step.packs]
        torch.stack(losses).sum().backward()
        outcome.append((torch.stack(losses).detach(), _lora_gradients(model)))
    (cached_loss, cached), (live_loss, live) = outcome
    assert torch.equal(cached_loss, live_loss)
    assert all(torch.equal(cached[name], live[name]) for name in live)
