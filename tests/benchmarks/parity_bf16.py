"""Cached against live at the 8B's true shapes in bfloat16 on one GPU; writes a Markdown table for docs/parity.md.

    python -m tests.benchmarks.parity_bf16 --work /path/on/a/fast/disk --out table.md

Needs about 20 GB of disk and 40 GB of GPU memory. Cached features come from shards that `pipeline cache` wrote; the
live logits from the stock model fed with pixels. As a yardstick, the stock model is run a second time with another
batch composition (four rows instead of one): what users get anyway from one batch size to another.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForImageTextToText

from cache.progress import Silent
from pipeline.config_file import load_config
from tests.benchmarks.train_command import pipeline, train_anew
from tests.benchmarks.true_shapes import make_8b_checkpoint, make_dataset
from train.features import features_on
from train.inputs import Inputs
from train.job import Job
from train.model import mm_encoder_outputs

ROWS = 4


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=24)
    arguments = parser.parse_args()
    config_file = prepare(arguments.work, arguments.images)
    lines = [_title(), *parity(config_file), *speed(config_file)]
    arguments.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def prepare(work: Path, images: int) -> Path:
    """Checkpoint, images and configuration."""
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = make_8b_checkpoint(work / "model-8b")
    rows = make_dataset(work / "data", images=images, questions=3)
    config = {
        "model": str(checkpoint),
        "data": {"splits": {"train": str(rows)}},
        "output_dir": str(work / "run"),
        "cache": {"dir": str(work / "features"), "num_workers": 8},
        "train": {
            "max_steps": 6,
            "effective_batch_size": 16,
            "lora": {"r": 32, "lora_alpha": 64},
            "dataloader_num_workers": 4,
            "report_to": ["none"],
        },
    }
    file = work / "my.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def parity(config_file: Path) -> list[str]:
    """Logits at the targets: cached, live, and live in another batch composition."""
    shutil.rmtree(load_config(config_file).cache_dir, ignore_errors=True)  # the time is that of caching everything
    started = time.perf_counter()
    pipeline("cache", "--config", str(config_file), "--split", "train")
    caching = time.perf_counter() - started
    c = load_config(config_file)
    inputs = Inputs.open(Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, True))
    samples = inputs.samples.training("train", inputs.known("train", Silent()), Silent())
    single = c.train.model_copy(update={"effective_batch_size": 1})
    steps = inputs.steps(samples, single, shuffle=False)
    device = torch.device("cuda", 0)
    stock = AutoModelForImageTextToText.from_pretrained(
        c.model.name_or_path, dtype=torch.bfloat16, device_map={"": device}
    ).eval()
    picked = [steps[0, 3 * i] for i in range(ROWS)]  # three questions an image: one row from each of four images
    live, cached, batched = [], [], []
    refs = [samples.samples[3 * i].images[0].ref for i in range(ROWS)]
    pixels = [_pixels(inputs, ref, device) for ref in refs]
    with torch.no_grad():
        for step, (values, grid) in zip(picked, pixels, strict=True):
            pack = step.packs[0].map_tensors("to", device)
            kinds = (pack.input_ids == inputs.image_token_id).int()
            shared = {"input_ids": pack.input_ids, "mm_token_type_ids": kinds, "image_grid_thw": grid[None]}
            out = stock(**shared, pixel_values=values, use_cache=False)
            live.append(out.logits[0, pack.target_positions].float())
            features = features_on(device, step.images, None)
            out = stock(**shared, mm_encoder_outputs=mm_encoder_outputs(features), use_cache=False)
            cached.append(out.logits[0, pack.target_positions].float())
        batched = _batched(stock, inputs, picked, pixels, device)
    return _table(live, cached, batched, caching)


def _pixels(inputs: Inputs, ref: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    from cache.preprocess import decode

    values, grid = inputs.processor(decode(ref.read(), where=ref.path, max_image_pixels=10**9), where=ref.path)
    return values.to(device), grid.to(device)


def _batched(stock: Any, inputs: Inputs, picked: list[Any], pixels: list[Any], device: torch.device) -> list[Any]:
    """The same rows, four in a right-padded batch, their images together in the tower."""
    packs = [step.packs[0].map_tensors("to", device) for step in picked]
    longest = max(pack.input_ids.shape[1] for pack in packs)
    ids = torch.zeros(len(packs), longest, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for row, pack in enumerate(packs):
        ids[row, : pack.input_ids.shape[1]] = pack.input_ids[0]
        mask[row, : pack.input_ids.shape[1]] = 1
    out = stock(
        input_ids=ids,
        attention_mask=mask,
        mm_token_type_ids=(ids == inputs.image_token_id).int(),
        pixel_values=torch.cat([values for values, _ in pixels]),
        image_grid_thw=torch.stack([grid for _, grid in pixels]),
        use_cache=False,
    )
    return [out.logits[row, pack.target_positions].float() for row, pack in enumerate(packs)]


def _table(live: list[Any], cached: list[Any], batched: list[Any], caching: float) -> list[str]:
    def compare(others: list[Any]) -> str:
        difference = max(float((a - b).abs().max()) for a, b in zip(live, others, strict=True))
        kl = max(
            float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1).max())
            for a, b in zip(live, others, strict=True)
        )
        equal = all(torch.equal(a, b) for a, b in zip(live, others, strict=True))
        return f"{'yes' if equal else 'no'} | {difference:.4g} | {kl:.3g}"

    scale = float(torch.cat(live).abs().max())
    return [
        "",
        f"Logits at the targets of {len(live)} rows ({sum(len(x) for x in live)} positions), largest {scale:.3g}.",
        "",
        "| compared with the stock model, one row at a time | bit-identical | largest difference | largest KL |",
        "|---|---|---|---|",
        f"| cached features (shards on disk) | {compare(cached)} |",
        f"| stock again, four rows in a batch | {compare(batched)} |",
        "",
        f"`pipeline cache`, whole command, loading included: {caching:.1f} s.",
    ]


def speed(config_file: Path) -> list[str]:
    """The real training loop, cached and live: median of the last steps."""
    torch.cuda.empty_cache()
    rows = [
        "",
        "| `pipeline train`, median of the last 4 steps | samples/s | data wait | peak GiB |",
        "|---|---|---|---|",
    ]
    for flag in (["--from-cache"], []):
        name = "cached" if flag else "live"
        output = config_file.with_name(f"run-{name}")
        torch.cuda.reset_peak_memory_stats()
        command = ["train", "--config", str(config_file), *flag, "--set", f"output_dir={output}"]
        last = train_anew(lambda command=command: pipeline(*command), output)[-4:]
        rate, wait, peak = (
            sorted(line[key] for line in last)[len(last) // 2]
            for key in ("samples_per_second", "data_wait_share", "peak_memory_gib")
        )
        rows.append(f"| {name} | {rate:.2f} | {wait:.1%} | {peak:.1f} |")
        torch.cuda.empty_cache()
    return rows


def _title() -> str:
    import transformers

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"


if __name__ == "__main__":
    main()
