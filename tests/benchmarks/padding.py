"""Share of tokens in the packs of mixed real images that are there only to fill up a block of the attention mask.

    python -m tests.benchmarks.padding [--images FOLDER] [--steps 100]

Images of the sizes of twelve real ones, or of a folder, at the grids that the 8B's processor gives them; 1 to 9
questions on each, of 5 to 60 tokens, with answers of 5 to 150. The packs are those of training on a GPU, in one process
and in four; no model runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cache.config import CacheConfig, ModelConfig
from cache.preprocess import ImageProcessor, header_size
from cache.records import ImageRef
from pipeline.demo.tiny_model import make_tiny_checkpoint
from train.chat import EncodedText
from train.features import FeatureSource, PixelImage, StepImage
from train.sample import Grid, Sample, SampleImage, make_sample
from train.step_dataset import StepDataset

IMAGE_TOKEN, QUESTIONS, QUESTION_TOKENS, ANSWER_TOKENS = 1, (1, 10), (5, 61), (5, 151)
# (height, width) of photographs, scans, screenshots and charts of the public repository QwenLM/Qwen3-VL, full size.
SIZES = (
    (359, 422),
    (281, 314),
    (900, 1600),
    (790, 1189),
    (1440, 2560),
    (530, 730),
    (480, 640),
    (1180, 800),
    (711, 474),
    (1532, 1014),
    (1205, 1280),
    (480, 640),
)


class NoFeatures(FeatureSource):
    """Gives nothing: only the rows are looked at."""

    bytes_per_token = 0

    def load(self, image: SampleImage) -> StepImage:
        """See FeatureSource."""
        return PixelImage(torch.empty(0), torch.tensor(image.grid))


def sizes_in(folder: Path) -> list[tuple[int, int]]:
    """(height, width) of a folder's images, by name."""
    return [header_size(file.read_bytes(), where=file.name) for file in sorted(folder.iterdir())]


def grids_of(processor: ImageProcessor, sizes: Sequence[tuple[int, int]] = SIZES) -> list[Grid]:
    """The grids of images of these sizes."""
    return [processor.grid_of(*size) for size in sizes]


def questions_on(grids: Sequence[Grid], images: int, merge_size: int, image_token: int = IMAGE_TOKEN) -> list[Sample]:
    """Samples over `images` images, each with a grid from the list; the same ones every time."""
    dice = np.random.default_rng(0)
    samples = []
    for number in range(images):
        image = SampleImage(f"{number}", grids[dice.integers(len(grids))], ImageRef(f"{number}"))
        for _ in range(dice.integers(*QUESTIONS)):
            question, answer = dice.integers(*QUESTION_TOKENS), dice.integers(*ANSWER_TOKENS)
            words = dice.integers(5, 250, question + answer)
            ids = np.concatenate([[2, 3, image_token], words]).astype(np.int32)
            weights = np.concatenate([np.zeros(3 + question), np.ones(answer)]).astype(np.float32)
            samples.append(make_sample(EncodedText(ids, weights, ()), (image,), merge_size=merge_size, source=""))
    return samples


def share_of_padding(
    samples: Sequence[Sample], merge_size: int, batch: int, budget: int, steps: int, world_size: int = 1
) -> float:
    """Of all tokens in the packs of an epoch's first steps, all processes together."""

    def tokens(rank: int, *, blocks: bool) -> int:
        dataset = StepDataset(
            samples,
            NoFeatures(),
            effective_batch_size=batch,
            tokens_per_pack=budget,
            image_token_id=IMAGE_TOKEN,
            merge_size=merge_size,
            seed=1,
            order="image",
            blocks=blocks,
            rank=rank,
            world_size=world_size,
        )
        return sum(pack.input_ids.shape[1] for n in range(min(steps, len(dataset))) for pack in dataset[0, n].packs)

    padded = sum(tokens(rank, blocks=True) for rank in range(world_size))
    return (padded - sum(tokens(rank, blocks=False) for rank in range(world_size))) / padded


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_tiny_checkpoint(Path(folder) / "tiny")  # its processor cuts images as the 8B's does
        processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(checkpoint)), CacheConfig())
    grids = grids_of(processor, SIZES if options.images is None else sizes_in(options.images))
    counts = [processor.num_tokens(grid) for grid in grids]
    samples = questions_on(grids, 40 * options.steps, processor.merge_size)
    mean = sum(sample.num_tokens for sample in samples) / len(samples)
    print(f"{len(grids)} sizes, {min(counts)} to {max(counts)} image tokens, {mean:.0f} tokens a sample\n")
    print("| samples a step | tokens a row, at most | processes | padding |\n|---|---|---|---|")
    for batch, budget in ((16, 8192), (36, 10240)):
        for processes in (1, 4):
            share = share_of_padding(samples, processor.merge_size, batch, budget, options.steps, processes)
            print(f"| {batch} | {budget} | {processes} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
