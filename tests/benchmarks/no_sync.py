"""Whether a training step makes the host wait for the GPU, or compiles anew, once it is warm. Needs a GPU.

    python -m tests.benchmarks.no_sync [--steps 6] [--nf4] [--checkpointing]

Steps of StepTrainer.training_step on a tiny model, of ever new shapes (questions on images of real sizes): packs with
shared prefixes from pinned memory, compiled layers, `train.attention: auto`. CUDA reports each wait;
the places are listed, and the exit code is 1 if there are any.
What comes after a step is left out: clipping and the optimizer are torch's, and a log line has to read the loss.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from cache.config import CacheConfig, ModelConfig
from cache.features import VisionFeatures
from cache.preprocess import ImageProcessor
from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.padding import grids_of, questions_on
from train.arguments import training_arguments
from train.config import LoraConfig, TrainConfig
from train.features import CachedImage, FeatureSource, StepImage
from train.lora import add_lora
from train.model import load_language_model, prepare_for_training
from train.sample import SampleImage, num_image_tokens
from train.step_dataset import StepDataset
from train.trainer import StepTrainer

WARM_UP, BATCH, BUDGET = 6, 24, 8192


class DrawnFeatures(FeatureSource):
    """Random features of an image's size."""

    def __init__(self, merge_size: int, hidden: int, levels: int) -> None:
        self._merge_size, self._shape = merge_size, (levels, hidden)
        self.bytes_per_token = (1 + levels) * hidden * torch.bfloat16.itemsize

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        levels, hidden = self._shape
        count = num_image_tokens(image.grid, self._merge_size)
        deepstack = torch.randn(levels, count, hidden, dtype=torch.bfloat16)
        main = torch.randn(count, hidden, dtype=torch.bfloat16)
        return CachedImage(VisionFeatures(main, deepstack, torch.tensor(image.grid)), torch.bfloat16)


def make_trainer(folder: Path, config: TrainConfig) -> StepTrainer:
    """A trainer over drawn questions on images of real shapes."""
    device = torch.device("cuda", 0)
    model_config = ModelConfig(name_or_path=str(make_tiny_checkpoint(folder / "tiny")))
    processor = ImageProcessor.from_checkpoint(model_config, CacheConfig())
    model: Any = load_language_model(model_config, config, device)
    hidden, image_token = model.config.text_config.hidden_size, model.config.image_token_id
    levels = len(model.config.vision_config.deepstack_visual_indexes)
    model = add_lora(model, config.lora, seed=1)
    prepare_for_training(model, config, device)
    steps = StepDataset(
        questions_on(grids_of(processor), 400, processor.merge_size, image_token),
        DrawnFeatures(processor.merge_size, hidden, levels),
        effective_batch_size=BATCH,
        tokens_per_pack=BUDGET,
        image_token_id=image_token,
        merge_size=processor.merge_size,
        seed=1,
        order="image",
        blocks=True,
    )
    trainer = StepTrainer(model, training_arguments(config, folder / "run", evaluate=False), steps, None)
    trainer.model_wrapped = trainer.accelerator.prepare_model(model)
    return trainer


def waits(trainer: StepTrainer, steps: int) -> tuple[Counter[str], int]:
    """Where the host waited in steps after the warm-up, and how often; and how many graphs these steps compiled."""
    found: Counter[str] = Counter()
    mode = torch.cuda.get_sync_debug_mode()

    def note(message: Any, *_: Any, **__: Any) -> None:
        frames = [f for f in traceback.extract_stack()[:-1] if "warnings.py" not in f.filename]
        if "called a synchronizing" in str(message):  # the announcement of the mode itself says something like it
            found["\n".join(f"    {f.filename}:{f.lineno} {f.name}: {f.line}" for f in frames[-6:])] += 1

    pinned = [trainer.train_dataset[0, n].pin_memory() for n in range(WARM_UP + steps)]
    coming = iter(pinned)
    for _ in range(WARM_UP):
        trainer.training_step(trainer.model_wrapped, trainer._ahead.take(coming))
    torch.cuda.synchronize()
    graphs = counters["stats"]["unique_graphs"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                trainer.training_step(trainer.model_wrapped, trainer._ahead.take(coming))
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.synchronize()
    return found, counters["stats"]["unique_graphs"] - graphs


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no_sync: THIS MACHINE HAS NO GPU; nothing was shown")
    config = TrainConfig(
        lora=LoraConfig(r=8),
        quantization="nf4" if options.nf4 else "none",
        gradient_checkpointing=options.checkpointing,
        tokens_per_pack=BUDGET,
        report_to=("none",),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(Path(folder), config)
        found, compiled = waits(trainer, options.steps)
    for place, count in found.most_common():
        print(f"{count} waits at\n{place}")
    for reason, count in counters["graph_break"].items():
        print(f"{count} graph breaks: {reason}")
    graphs = counters["stats"]["unique_graphs"]
    print(f"{options.steps} warm steps: {sum(found.values())} waits, {compiled} of {graphs} graphs compiled in them")
    if found or compiled or counters["graph_break"]:
        raise SystemExit(1)
    print("ok")


if __name__ == "__main__":
    main()
