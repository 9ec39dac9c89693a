"""30 optimizer steps of `pipeline train --from-cache` against a plain loop over the stock, uncached, unpacked model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, get_scheduler

from cache.progress import Silent
from pipeline.cli import app
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from pipeline.exit import exit_code_of
from train.inputs import Inputs
from train.step_dataset import StepDataset

from .conftest import Stock, job_of

STEPS, BATCH, LEARNING_RATE, SEED = 30, 4, 5e-3, 11
LINEAR = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def _run(*arguments: str) -> None:
    assert exit_code_of(lambda: app(list(arguments), standalone_mode=False)) == 0


def _order(config: PipelineConfig, steps: int) -> list[list[int]]:
    """Which rows are in each step: the documented order, a permutation by (seed, epoch) cut into batches."""
    import numpy as np

    count = len((Path(config.data.splits["train"].path)).read_text().splitlines())
    found: list[list[int]] = []
    epoch = 0
    while len(found) < steps:
        order = np.random.default_rng((SEED, epoch)).permutation(count).tolist()
        found += [order[start : start + BATCH] for start in range(0, count, BATCH)]
        epoch += 1
    return found[:steps]


def _plain_loop(
    checkpoint: Path, rows: list[dict[str, Any]], order: list[list[int]], root: Path
) -> tuple[list[float], Any]:
    """What a person would write with transformers, PEFT and torch alone: pixels in, one sample at a time."""
    stock = Stock.load(checkpoint, 128 * 128)
    pattern = rf".*language_model\.(.*\.)?({LINEAR})"
    torch.manual_seed(SEED)
    model = get_peft_model(
        stock.model.requires_grad_(False),
        LoraConfig(r=4, lora_alpha=32, target_modules=pattern, task_type=TaskType.CAUSAL_LM),
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    encoded = []
    for row in rows:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]},
            {"role": "assistant", "content": row["answer"]},
        ]
        inputs = stock.inputs(messages, [root / row["image"]])
        labels = torch.where(stock.answer_mask(messages, inputs["input_ids"]), inputs["input_ids"][0], -100)
        encoded.append((inputs, labels))
    curve = []
    for step in order:
        total = sum(int((encoded[index][1] != -100).sum()) for index in step)
        loss = 0.0
        for index in step:
            inputs, labels = encoded[index]
            logits = model(**inputs, use_cache=False).logits
            part = cross_entropy(logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum") / total
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curve.append(loss)
    return curve, model


@pytest.fixture(scope="module")
def rows(data_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir / "train.jsonl").read_text().splitlines()]


def test_thirty_steps_and_what_comes_after(
    tiny: Path, data_dir: Path, rows: list[dict[str, Any]], write_config: Callable[..., Path]
) -> None:
    train = {
        "effective_batch_size": BATCH,
        "tokens_per_pack": 200,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "warmup_steps": 3,
        "seed": SEED,
        "order": "sample",
        "eval_split": None,
    }
    file = write_config({"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}, train=train)
    config = load_config(file)
    _run("cache", "--config", str(file), "--split", "train")
    _run("train", "--config", str(file), "--from-cache")
    lines = [json.loads(line) for line in (config.output_dir / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in lines if "samples_per_second" in line]

    expected, oracle = _plain_loop(tiny, rows, _order(config, STEPS), data_dir)
    assert len(ours) == STEPS
    assert expected[-1] < 0.8 * expected[0]  # it learns, so the curves have something to differ in
    assert ours == pytest.approx(expected, rel=1e-5)

    saved = load_file(config.output_dir / "adapter" / "adapter_model.safetensors")
    wanted = {name.replace(".default", ""): p.detach() for name, p in oracle.named_parameters() if p.requires_grad}
    assert saved.keys() == wanted.keys()
    difference = torch.stack([(saved[n] - wanted[n]).square().sum() for n in wanted]).sum().sqrt()
    norm = torch.stack([wanted[n].square().sum() for n in wanted]).sum().sqrt()
    print(f"adapter: relative Frobenius difference {difference / norm:.2e}")
    assert difference / norm < 1e-3

    _eval_and_predict_agree(tiny, data_dir, file, config)


def _eval_and_predict_agree(tiny: Path, data_dir: Path, file: Path, config: PipelineConfig) -> None:
    """The adapter in the stock full model answers from pixels what eval answered from the cache."""
    _run("cache", "--config", str(file), "--split", "val")
    _run("eval", "--config", str(file), "--split", "val")
    predictions = [
        json.loads(line) for line in (config.output_dir / "eval-val" / "predictions.jsonl").read_text().splitlines()
    ]
    stock = Stock.load(tiny, 128 * 128)
    base = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, config.output_dir / "adapter").eval()
    assert len(predictions) == 5
    answers = []
    for prediction in predictions:
        question = prediction["question"].removeprefix("<image>")
        messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        inputs = stock.inputs(messages, [data_dir / prediction["images"][0]])
        prompt = stock.tokenizer("<|im_start|>assistant\n", return_tensors="pt")["input_ids"]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], prompt], dim=1)
        inputs["mm_token_type_ids"] = torch.cat(
            [inputs["mm_token_type_ids"], torch.zeros_like(prompt, dtype=torch.int32)], dim=1
        )
        with torch.no_grad():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=config.eval.max_new_tokens)
        answers.append(stock.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert [p["prediction"] for p in predictions] == answers
    assert len(set(answers)) > 1


def test_thirty_steps_with_shared_prefixes_and_without(
    data_dir: Path, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    train = {"effective_batch_size": 8, "max_steps": STEPS, "learning_rate": LEARNING_RATE, "eval_split": None}
    file = write_config(
        {"train": str(data_dir / "train.jsonl")},
        train={**train, "order": "image"},
        cache={"dir": str(tmp_path / "features")},
    )
    config = load_config(file)
    _run("cache", "--config", str(file), "--split", "train")
    curves, tokens = {}, {}
    for share in (True, False):
        output = config.output_dir.with_name(f"shared-{share}")
        _run(
            "train",
            "--config",
            str(file),
            "--from-cache",
            "-s",
            f"train.share_prefixes={share}",
            "-s",
            f"output_dir={output}",
        )
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        curves[share] = [line["loss"] for line in lines if "samples_per_second" in line]
        steps = _steps(config.model_copy(update={"train": config.train.model_copy(update={"share_prefixes": share})}))
        tokens[share] = sum(pack.input_ids.shape[1] for pack in steps[0, 0].packs)
    assert tokens[True] < 0.8 * tokens[False]  # there is something to share
    assert len(curves[True]) == STEPS
    assert curves[True][-1] < 0.8 * curves[True][0]
    assert curves[True] == pytest.approx(curves[False], rel=1e-5)


def _steps(config: PipelineConfig) -> StepDataset:
    inputs = Inputs.open(job_of(config))
    return inputs.steps(
        inputs.samples.training("train", inputs.known("train", Silent()), Silent()), config.train, shuffle=True
    )


def test_steps_do_not_depend_on_how_they_are_split(data_dir: Path, make_config: Callable[..., PipelineConfig]) -> None:
    """The same rows are in a step whatever the pack size or the number of processes."""
    from cache.build import CacheBuilder

    config = make_config({"train": str(data_dir / "train.jsonl")}, train={"effective_batch_size": 7})
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    inputs = Inputs.open(job_of(config))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())

    def contents(tokens_per_pack: int, world_size: int, epoch: int, step: int) -> tuple[list[tuple[int, ...]], float]:
        settings = config.train.model_copy(update={"tokens_per_pack": tokens_per_pack, "share_prefixes": False})
        found, weight = [], 0.0
        for rank in range(world_size):
            part = inputs.steps(samples, settings, shuffle=True, rank=rank, world_size=world_size)[epoch, step]
            for pack in part.packs:
                if pack.target_weights.any():
                    ends = [0, *torch.unique(pack.visible_until).tolist()]
                    ids = pack.input_ids[0].tolist()
                    found += [tuple(ids[a:b]) for a, b in itertools.pairwise(ends)]
            weight = part.total_weight
        return sorted(found), weight

    reference = contents(10**6, 1, 0, 1)
    assert len(reference[0]) == 7
    assert all(contents(budget, world, 0, 1) == reference for budget in (1, 150, 10**6) for world in (1, 2, 4))
    assert contents(10**6, 1, 1, 1) != reference
    last = contents(100, 4, 0, 5)  # 37 rows: two are left for the last step, fewer than processes
    assert len(last[0]) == 2
