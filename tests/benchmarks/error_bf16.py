"""How far training in bfloat16 (and on an FP8 base) is from fp32, beside how far the stock model in bfloat16 is.

    python -m tests.benchmarks.error_bf16 --work /path/on/a/fast/disk --out table.md

Qwen3-VL-8B's shapes with random weights and a random adapter. The reference is the stock model in fp32, fed with
pixels, a sample at a time. Measured: logits at the targets, and every gradient of the adapter, after one step of
questions on shared images. Needs about 20 GB of disk and 60 GB of GPU memory.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from cache.preprocess import decode
from cache.progress import Silent
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from tests.benchmarks.training_cases import Case, prepare
from tests.benchmarks.true_shapes import make_8b_checkpoint
from train.attention import attention_kind
from train.features import features_on
from train.inputs import Inputs
from train.job import Job
from train.lora import add_lora
from train.loss import pack_logits, pack_loss
from train.model import autocast, load_language_model, prepare_for_training
from train.prefix_tree import sharing_order, symbols_of

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Outcome:
    """Logits at the targets of all samples in order, and the adapter's gradients, on the CPU in fp32."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    checkpoint = make_8b_checkpoint(arguments.work / "model-8b")
    config = load_config(prepare(arguments.work, checkpoint, Case(9, 2, 10240, {})))
    fp32 = config.model_copy(update={"train": config.train.model_copy(update={"precision": "fp32", "tf32": False})})
    fp8 = config.model_copy(update={"train": config.train.model_copy(update={"quantization": "fp8"})})
    flex = config.model_copy(update={"train": config.train.model_copy(update={"attention": "flex"})})
    kind = attention_kind(config.train, DEVICE)
    reference = _alone(lambda: stock(fp32))
    lines = [
        torch.cuda.get_device_name(),
        "",
        "| against the stock model in fp32 | logits | adapter's gradients |",
        "|---|---|---|",
    ]
    for name, run in (
        ("stock, bfloat16, from pixels, a sample at a time", lambda: stock(config)),
        ("from the cache, bfloat16, shared prefixes, compiled, flex", lambda: ours(flex)),
        (f"from the cache, bfloat16, shared prefixes, compiled, {kind}", lambda: ours(config)),
        (f"from the cache, FP8 base, shared prefixes, compiled, {kind}", lambda: ours(fp8)),
    ):
        lines.append(f"| {name} | {_errors(_alone(run), reference)} |")
        print(lines[-1], flush=True)
    arguments.out.write_text("\n".join(lines) + "\n")


def stock(config: PipelineConfig) -> Outcome:
    """The stock class on pixels."""
    inputs, samples = _inputs(config)
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    model = AutoModelForImageTextToText.from_pretrained(
        config.model.name_or_path, dtype=dtype, device_map={"": DEVICE}
    ).requires_grad_(False)
    model = _with_adapter(model, config)
    single = config.train.model_copy(
        update={"effective_batch_size": 1, "share_prefixes": False, "attention": "sdpa", "tokens_per_pack": 1}
    )
    steps = inputs.steps(samples, single, shuffle=False)
    first = samples.samples[: config.train.effective_batch_size]
    total = sum(sample.total_weight for sample in first)
    logits = []
    for number in sharing_order(symbols_of(first, inputs.image_token_id)):  # the order in which a pack holds them
        pack = steps[0, number].packs[0].map_tensors("to", DEVICE)
        ref = samples.samples[number].images[0].ref
        values, grid = inputs.processor(decode(ref.read(), where=ref.path, max_image_pixels=10**9), where=ref.path)
        with autocast(config.train, DEVICE):
            output = model(
                input_ids=pack.input_ids,
                mm_token_type_ids=(pack.input_ids == inputs.image_token_id).int(),
                pixel_values=values.to(DEVICE),
                image_grid_thw=grid[None].to(DEVICE),
                logits_to_keep=pack.target_positions,
                use_cache=False,
            )
            losses = cross_entropy(output.logits[0].float(), pack.target_ids, reduction="none")
            ((losses * pack.target_weights).sum() / total).backward()
        logits.append(output.logits[0].detach().float().cpu())
    return Outcome(torch.cat(logits), _gradients(model))


def ours(config: PipelineConfig) -> Outcome:
    """The training path: cached features, one row with shared prefixes, flex_attention, compiled layers."""
    inputs, samples = _inputs(config)
    model = _with_adapter(load_language_model(config.model, config.train, DEVICE), config)
    prepare_for_training(model, config.train, DEVICE)
    step = inputs.steps(samples, config.train, shuffle=False)[0, 0]
    features = features_on(DEVICE, step.images, None)
    (pack,) = (pack.map_tensors("to", DEVICE) for pack in step.packs)
    with autocast(config.train, DEVICE):
        with torch.no_grad():
            logits = pack_logits(model, pack, features).float().cpu()
        pack_loss(model, pack, features, scale=1 / step.total_weight).backward()
    return Outcome(logits, _gradients(model))


def _inputs(config: PipelineConfig) -> tuple[Inputs, Any]:
    c = config
    inputs = Inputs.open(Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, True))
    return inputs, inputs.samples.training("train", inputs.known("train", Silent()), Silent())


def _with_adapter(model: Any, config: PipelineConfig) -> Any:
    """An adapter whose second factor is not zero, so that the first has a gradient too; the same for every model."""
    model = add_lora(model, config.train.lora, seed=1)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad and "lora_B" in name:
            generator = torch.Generator(DEVICE).manual_seed(len(name) + sum(map(ord, name)))
            parameter.data = torch.randn(parameter.shape, generator=generator, device=DEVICE) * 0.01
    return model.train()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def _alone(run: Callable[[], Outcome]) -> Outcome:
    outcome = run()
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    return outcome


def _errors(found: Outcome, right: Outcome) -> str:
    """Relative Frobenius norms of the differences."""
    assert found.logits.shape == right.logits.shape
    logits = float((found.logits - right.logits).norm() / right.logits.norm())
    assert found.gradients.keys() == right.gradients.keys()
    difference = sum(float((g - right.gradients[n]).double().pow(2).sum()) for n, g in found.gradients.items())
    size = sum(float(g.double().pow(2).sum()) for g in right.gradients.values())
    return f"{logits:.4g} | {(difference / size) ** 0.5:.4g}"


if __name__ == "__main__":
    main()
