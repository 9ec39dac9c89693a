"""The loss of each stage of a staged answer: against the stock model, over packs, shared prefixes and processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from cache.build import CacheBuilder
from cache.config import ModelConfig
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.chat import ChatEncoder, EncodedText, StageSpan
from train.config import TrainConfig
from train.evaluate_split import run_evaluation
from train.inputs import Inputs
from train.loss import pack_loss
from train.model import load_language_model
from train.pack import Pack, build_pack
from train.prefix_tree import sharing_order, symbols_of
from train.run import run_training
from train.sample import Sample, make_sample
from train.stage_losses import StageLosses

from .conftest import Run, job_of
from .processes import train

pytestmark = pytest.mark.timeout(900)

CPU = torch.device("cpu")
ROWS = [
    {"question": "What is wrong?", "stages": [("observe", "A red spot.", 1.0), ("reason", "It is round.", 0.5)]},
    {"question": "What is wrong?", "stages": [("observe", "A red spot.", 1.0), ("reason", "It is flat.", 0.5)]},
    {"question": "What is wrong?", "stages": [("observe", "A blue spot.", 1.0), ("answer", "Nothing.", 2.0)]},
    {"question": "Who?", "stages": [("answer", "Nobody.", 2.0)]},
    {"question": "What is this?", "answer": "A plain answer."},
]


def _write(file: Path, rows: list[dict[str, Any]]) -> Path:
    lines = []
    for row in rows:
        staged = [{"name": name, "target": target, "weight": weight} for name, target, weight in row.get("stages", [])]
        lines.append(json.dumps({**row, "image": [], **({"stages": staged} if staged else {})}))
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.fixture
def config(make_config: Callable[..., PipelineConfig], tmp_path: Path) -> PipelineConfig:
    """Staged rows as train and val, text only."""
    staged = _write(tmp_path / "staged.jsonl", ROWS[:4])
    return make_config(
        {"train": str(staged), "val": str(staged)},
        cache={"dir": str(tmp_path / "features")},
        train={"max_steps": 2, "effective_batch_size": 4, "learning_rate": 1e-2, "order": "file", "eval_steps": 1},
    )


@pytest.fixture
def job(config: PipelineConfig) -> Any:
    """Its cache is there."""
    builder = CacheBuilder(config.model, config.data, config.cache, config.cache_dir)
    for split in config.data.splits:
        builder.run(split, Silent())
    return job_of(config)


def _expected(model: Any, samples: list[Sample]) -> dict[str, float]:
    """Each row by itself through the stock forward, its tokens sorted into stages here."""
    sums: dict[str, list[float]] = {}
    for sample in samples:
        ids = torch.from_numpy(sample.text.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = cross_entropy(logits, ids[0, 1:], reduction="none")
        for span in sample.text.stages:
            weights = torch.from_numpy(sample.text.weights[span.start : span.stop])
            total = sums.setdefault(f"loss_{span.name}", [0.0, 0.0])
            total[0] += float((losses[span.start - 1 : span.stop - 1] * weights).sum())
            total[1] += float(weights.sum())
    return {name: total / weight for name, (total, weight) in sums.items()}


def test_spans_hold_the_text_of_their_stage_and_all_targets(job: Any) -> None:
    encoder: ChatEncoder = Inputs.open(job).samples.encoder
    samples = Inputs.open(job).samples.training("train", Inputs.open(job).known("train", Silent()), Silent()).samples
    text = samples[0].text

    told = {span.name: encoder.tokenizer.decode(text.input_ids[span.start : span.stop]) for span in text.stages[:2]}

    assert told == {"observe": "A red spot.\n", "reason": "It is round."}
    assert encoder.tokenizer.decode(text.input_ids[text.stages[2].start : text.stages[2].stop]) == "<|im_end|>"
    assert text.stages[2].name == "reason"
    for sample in samples:
        inside = np.zeros(len(sample.text.weights), dtype=bool)
        for span in sample.text.stages:
            inside[span.start : span.stop] = True
        assert (inside == (sample.text.weights > 0)).all()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tokens_per_pack", [1, 10**6])
def test_evaluation_gives_the_stock_models_loss_of_each_stage(job: Any, share: bool, tokens_per_pack: int) -> None:
    from dataclasses import replace

    train = job.train.model_copy(update={"share_prefixes": share, "tokens_per_pack": tokens_per_pack})
    inputs = Inputs.open(job)
    samples = inputs.samples.training("val", inputs.known("val", Silent()), Silent()).samples
    model = load_language_model(ModelConfig(name_or_path=job.model.name_or_path), TrainConfig(precision="fp32"), CPU)

    scores = run_evaluation(replace(job, train=train), "val", None, Silent()).scores

    expected = _expected(model, samples)
    assert list(expected) == ["loss_observe", "loss_reason", "loss_answer"]
    assert {name: scores[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def _drawn(stages: list[tuple[StageSpan, ...]]) -> list[Sample]:
    """Samples of 40 equal tokens, of which the last ten are targets."""
    weights = np.where(np.arange(40) >= 30, 1.0, 0.0).astype(np.float32)
    ids = np.arange(100, 140, dtype=np.int32)
    return [make_sample(EncodedText(ids, weights, (), spans), (), merge_size=2, source="drawn") for spans in stages]


def _pack(samples: list[Sample], names: tuple[str, ...]) -> Pack:
    symbols = symbols_of(samples, 5)
    options: dict[str, Any] = {"image_token_id": 5, "merge_size": 2, "share": True, "stages": names}
    return build_pack(samples, symbols, sharing_order(symbols), {}, **options)


def test_a_shared_token_counts_for_the_stage_of_each_sample() -> None:
    a, b = StageSpan("a", 30, 34), StageSpan("b", 34, 40)
    pack = _pack(_drawn([(a, b), (a, b), (StageSpan("b", 30, 40),), ()]), ("a", "b"))

    assert pack.stage_weights is not None
    assert pack.target_weights.tolist() == [4.0] * 10
    assert pack.stage_weights.tolist() == [[2.0] * 4 + [0.0] * 6, [1.0] * 4 + [3.0] * 6]


def test_data_without_stages_has_nothing_to_count() -> None:
    pack = _pack(_drawn([(), ()]), ())
    stages = StageLosses((), CPU)

    assert (pack.stage_weights, stages.room(pack), stages.take()) == (None, None, {})


def test_a_stage_without_a_target_is_left_out_and_taking_starts_anew() -> None:
    pack = _pack(_drawn([(StageSpan("a", 30, 40),)]), ("a", "b"))
    stages = StageLosses(("a", "b"), CPU)

    stages.add(pack, torch.full((10,), 3.0))
    stages.add(pack, torch.full((10,), 5.0))

    assert stages.take() == {"loss_a": 4.0}
    assert stages.take() == {}


@pytest.mark.parametrize("grad", [True, False])
def test_asking_for_losses_changes_neither_loss_nor_gradient(
    tiny: Path, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.head.SLICE_BYTES", 1)  # a slice a target
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), TrainConfig(precision="fp32"), CPU)
    weight = model.model.language_model.layers[0].self_attn.q_proj.weight.requires_grad_(grad)
    pack = _pack(_drawn([(StageSpan("a", 30, 40),)]), ("a",))
    room = torch.full((10,), torch.nan)

    found = []
    for losses in (None, room):
        weight.grad = None
        loss = pack_loss(model, pack, [], scale=0.25, losses=losses)
        if grad:
            loss.backward()
        found.append((loss.detach(), weight.grad))

    assert torch.equal(found[0][0], found[1][0])
    assert not grad or torch.equal(found[0][1], found[1][1])
    assert float((room * 0.25).sum()) == pytest.approx(float(found[0][0]), rel=1e-5)


def test_training_reports_each_stage_and_together_they_are_the_loss(job: Any) -> None:
    run_training(job, Silent())

    lines = Run(job.output_dir).lines()
    trained = [line for line in lines if "samples_per_second" in line]
    evaluated = [line for line in lines if "eval_loss" in line]
    assert (len(trained), len(evaluated)) == (2, 2)
    inputs = Inputs.open(job)
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent()).samples
    weights: dict[str, float] = {}
    for text in (sample.text for sample in samples):
        for span in text.stages:
            weights[span.name] = weights.get(span.name, 0.0) + float(text.weights[span.start : span.stop].sum())
    for prefix, line in [("", trained[0]), ("", trained[1]), ("eval_", evaluated[0])]:
        total = sum(weights[name] * line[f"{prefix}loss_{name}"] for name in weights)
        assert total / sum(weights.values()) == pytest.approx(line[f"{prefix}loss"], rel=1e-4)
    # The same four rows are train and val, and a fresh adapter changes nothing.
    model = load_language_model(ModelConfig(name_or_path=job.model.name_or_path), TrainConfig(precision="fp32"), CPU)
    assert {name: trained[0][name] for name in _expected(model, samples)} == pytest.approx(
        _expected(model, samples), rel=1e-5
    )


def test_two_processes_report_what_one_reports(job: Any, tmp_path: Path) -> None:
    # Four rows in steps of three: the second step has a row for one process only.
    outcomes = [
        train(tmp_path / "my.yaml", tmp_path / name, count, "train.effective_batch_size=3")
        for name, count in (("one", 1), ("two", 2))
    ]

    one, two = (
        [{key: value for key, value in line.items() if "loss" in key} for line in Run(outcome.folder).lines()]
        for outcome in outcomes
    )
    assert [outcome.codes for outcome in outcomes] == [[0], [0, 0]], outcomes[1].said
    assert sorted(one[0]) == ["loss", "loss_answer", "loss_observe", "loss_reason"]
    assert len(two) == len(one)
    for line, expected in zip(two, one, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
