"""What storing features in 8 bits does: error against the tower, change of the answers, and what training reaches.

`OMP_NUM_THREADS=1 python -m tests.benchmarks.storage_dtypes --work FOLDER [--steps 300] [--seeds 1] [--out table.md]`

The demo's tiny random model and drawn screenshots; CPU. The tables are those of docs/benchmarks/storage-dtypes.md.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config import PipelineConfig
from pipeline.demo.run import demo_config
from pipeline.demo.screenshots import make_screenshots
from pipeline.demo.tiny_model import make_tiny_checkpoint
from train.compare import Comparison, compare_with_live
from train.evaluate_split import run_evaluation
from train.job import Job, is_finished
from train.run import run_training

STORAGE = {"bfloat16": "same", "float8_e4m3": "float8_e4m3", "int8": "int8"}


def config_of(work: Path, storage: str, seed: int, steps: int) -> PipelineConfig:
    """The demo's, with the tower in bf16, and one cache folder for all."""
    settings: dict[str, Any] = demo_config(work)
    settings["output_dir"] = str(work / f"run-{storage}-{seed}")
    settings["cache"] = {"dtype": "bfloat16", "storage_dtype": STORAGE[storage], "dir": str(work / "features")}
    settings["train"] |= {"max_steps": steps, "seed": seed, "eval_split": None, "save_steps": steps}
    settings["train"] |= {"report_to": ["none"], "dataloader_num_workers": 0}
    return PipelineConfig.model_validate(settings)


def job_of(config: PipelineConfig) -> Job:
    """The training job, from the cache."""
    c = config
    return Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, True)


def measure(work: Path, storage: str, seed: int, steps: int) -> tuple[str, Comparison, Comparison]:
    """Scores on val after training as a row, and the comparison on val of the bare and of the trained model."""
    config = config_of(work, storage, seed, steps)
    builder = CacheBuilder(config.model, config.data, config.cache, config.cache_dir)
    for split in config.data.splits:
        builder.run(split, Silent())
    job = job_of(config)
    if not is_finished(job):  # the script may be run again
        run_training(job, Silent(), lambda: False)
    adapter = config.output_dir / "adapter"
    bare = compare_with_live(job, "val", 32, 64, Silent())
    trained = compare_with_live(job, "val", 32, 64, Silent(), adapter=adapter)
    cached, live = (
        run_evaluation(replace(job, from_cache=from_cache), "val", adapter, Silent()).scores
        for from_cache in (True, False)
    )
    row = f"| {storage} | {seed} | {cached['exact_match']:.1%} | {live['exact_match']:.1%} | "
    return f"{row}{cached['loss']:.4f} | {live['loss']:.4f} |", bare, trained


def error_rows(results: dict[str, Comparison]) -> list[str]:
    """The error of each level."""
    names = [level.name for level in next(iter(results.values())).levels]
    rows = [f"| stored as | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for storage, found in results.items():
        rows.append(f"| {storage} | " + " | ".join(f"{level.overall:.2%}" for level in found.levels) + " |")
    return rows


def answer_row(storage: str, model: str, found: Comparison) -> str:
    """Change of the loss and divergence of the answer tokens."""
    changes = [answer.cached_loss - answer.live_loss for answer in found.answers]
    values = [value for answer in found.answers for value in answer.divergences]
    live = sum(answer.live_loss for answer in found.answers) / len(changes)
    turned = sum(answer.turned for answer in found.answers)
    return (
        f"| {storage} | {model} | {live:.4f} | {sum(changes) / len(changes):+.1e} | {max(map(abs, changes)):.1e} | "
        f"{sum(values) / len(values):.1e} | {max(values):.1e} | {turned} of {len(values)} |"
    )


def main() -> None:
    """Run everything and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    make_tiny_checkpoint(given.work / "model")
    make_screenshots(given.work / "data")
    bare: dict[str, Comparison] = {}
    answers = [
        "| stored as | model | loss, live | mean change | largest of a record | KL, mean | KL, largest | turned |",
        "|---" * 8 + "|",
    ]
    reached = ["| stored as | seed | exact match, cache | live | loss, cache | live |", "|---" * 6 + "|"]
    for seed in range(given.seeds):
        for storage in STORAGE:
            row, untrained, trained = measure(given.work, storage, seed, given.steps)
            reached.append(row)
            print(row, flush=True)
            if seed == 0:
                bare[storage] = untrained
                answers += [answer_row(storage, "bare", untrained), answer_row(storage, "trained", trained)]
    text = "\n".join([*error_rows(bare), "", *answers, "", *reached]) + "\n"
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
