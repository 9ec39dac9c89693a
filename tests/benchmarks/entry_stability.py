"""Are an image's features the same bits whatever was encoded before it, and in whatever process?

    python -m tests.benchmarks.entry_stability --towers stock,fast --attention sdpa
    python -m tests.benchmarks.entry_stability --towers fast --attention flash_attention_4
    python -m tests.benchmarks.entry_stability --towers stock --tiny       # on a CPU, to try the command

Images of several shapes are encoded one by one, in as many orders as `--orders` says, each in a fresh process, the
first twice. The compiled tower chooses its products by timing in each process, and compiles for the first
shape that it meets: so orders and processes are where bits could differ. Says of each tower how many images do, and how
far (relative to the features' root mean square). It exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cache.config import CacheConfig, ModelConfig
from cache.vision_tower import VisionTower
from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.true_tower import make_tower_checkpoint

GRIDS = [(1, 64, 80), (1, 80, 64), (1, 48, 48), (1, 30, 40), (1, 64, 80), (1, 100, 60)]  # of patches; one comes twice
TINY_GRIDS = [(1, 4, 6), (1, 6, 4), (1, 8, 8), (1, 2, 4), (1, 4, 6), (1, 10, 6)]
PATCH = 1536  # numbers of a patch


def main() -> int:
    """Encode in fresh processes, compare, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", default="stock,fast")
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "flash_attention_4"])
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--encode", nargs=3, metavar=("CHECKPOINT", "ORDER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.encode:
        encode(arguments, *arguments.encode)
        return 0
    device = "CPU" if arguments.tiny else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {arguments.attention}\n")
    print("| tower | processes compared with the first | images that differ | largest difference / rms |")
    print("|---|---|---|---|")
    worst = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = folder / "model"
        checkpoint = make_tiny_checkpoint(target) if arguments.tiny else make_tower_checkpoint(target, device="cuda")
        for tower in arguments.towers.split(","):
            count, different, largest = compare(arguments, tower, checkpoint, folder)
            worst = max(worst, different)
            print(f"| {tower} | {count} | {different} of {count * len(GRIDS)} | {largest:.2g} |")
    return int(worst > 0)


def compare(arguments: argparse.Namespace, tower: str, checkpoint: Path, folder: Path) -> tuple[int, int, float]:
    """Number of processes beside the first, images in them that differ from the first's, and how far at most."""
    first = list(range(len(GRIDS)))
    orders = [first, first, *(random.Random(seed).sample(first, len(first)) for seed in range(arguments.orders - 1))]
    found = []
    for number, order in enumerate(orders):
        out = folder / f"{tower}-{number}.safetensors"
        options = ["--towers", tower, "--attention", arguments.attention, *(["--tiny"] if arguments.tiny else [])]
        command = [sys.executable, "-m", "tests.benchmarks.entry_stability", *options]
        order_text = ",".join(map(str, order))
        subprocess.run([*command, "--encode", str(checkpoint), order_text, str(out)], check=True)
        found.append(load_file(out))
    different, largest = 0, 0.0
    for other in found[1:]:
        for image, features in other.items():
            expected = found[0][image]
            if not torch.equal(features.view(torch.uint8), expected.view(torch.uint8)):
                different += 1
                far = (features.float() - expected.float()).abs().max() / expected.float().square().mean().sqrt()
                largest = max(largest, float(far))
    return len(found) - 1, different, largest


def encode(arguments: argparse.Namespace, checkpoint: str, order: str, out: str) -> None:
    """In one process: every image by itself, in an order; its features, all levels in one tensor, by its number."""
    cache = CacheConfig(
        tower=arguments.towers,
        attn_implementation=arguments.attention,
        device="cpu" if arguments.tiny else "cuda",
    )
    tower = VisionTower.load(ModelConfig(name_or_path=checkpoint), cache)
    found = {}
    for number in map(int, order.split(",")):
        grid = (TINY_GRIDS if arguments.tiny else GRIDS)[number]
        generator = torch.Generator().manual_seed(number)
        pixels = torch.rand((grid[1] * grid[2], PATCH), generator=generator) * 2 - 1
        (features,) = tower.encode([pixels], [torch.tensor(grid)])
        levels = torch.cat([features.image_embeds[None], features.deepstack_features])
        found[str(number)] = levels.cpu().contiguous()
    save_file(found, out)


if __name__ == "__main__":
    sys.exit(main())
