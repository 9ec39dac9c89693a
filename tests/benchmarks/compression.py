"""Whether lossless compression of bfloat16 features pays: ratio and speed, whole and with the bytes split into planes.

`python -m tests.benchmarks.compression [CACHE_FOLDER]`; needs `pip install zstandard lz4`, which nothing else does.
Without a folder: the features of a tower of the 8B's shapes with random weights, on drawn screenshots.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lz4.frame
import numpy as np
import numpy.typing as npt
import torch
import zstandard
from PIL import Image as PilImage
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cache.reader import FeatureCache
from pipeline.demo.screenshots import make_screenshots

METHODS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
    "lz4": (lz4.frame.compress, lz4.frame.decompress),
    "zstd 1": (zstandard.ZstdCompressor(1).compress, zstandard.ZstdDecompressor().decompress),
    "zstd 3": (zstandard.ZstdCompressor(3).compress, zstandard.ZstdDecompressor().decompress),
}


def random_tower_features(images: int = 6) -> list[bytes]:
    """Main output and DeepStack levels of the 8B's tower, weights drawn at 1/sqrt(fan-in), 320x480 screenshots."""
    shapes = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
        "num_position_embeddings": 2304,
    }
    torch.manual_seed(0)
    tower = Qwen3VLVisionModel(Qwen3VLConfig(vision_config=shapes).vision_config).eval().to(torch.bfloat16)
    with torch.no_grad():
        for weight in tower.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        make_screenshots(Path(folder), train_images=images, val_images=1)
        for file in sorted(Path(folder).rglob("*.png"))[:images]:
            picture = PilImage.open(file).convert("RGB").resize((480, 320))
            pixels = torch.from_numpy(np.array(picture)).float().div(127.5).sub(1)
            # (rows, 2, 16, columns, 2, 16, RGB) -> patches in the order of the merger, two equal frames each
            patches = pixels.view(10, 2, 16, 15, 2, 16, 3).permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
            flat = patches.expand(-1, -1, -1, -1, -1, 2, -1, -1).reshape(600, -1).to(torch.bfloat16)
            with torch.no_grad():
                out = tower(flat, grid_thw=torch.tensor([[1, 20, 30]]))
            found += [as_bytes(tensor) for tensor in (out.pooler_output, *out.deepstack_features)]
    return found


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def planes(raw: bytes) -> list[bytes]:
    """Low bytes (mantissa), then high bytes (sign and exponent)."""
    pairs: npt.NDArray[np.uint8] = np.frombuffer(raw, dtype=np.uint8).reshape(-1, 2)
    return [pairs[:, 0].tobytes(), pairs[:, 1].tobytes()]


def joined(parts: list[bytes]) -> bytes:
    whole = np.empty((len(parts[0]), len(parts)), dtype=np.uint8)
    for number, part in enumerate(parts):
        whole[:, number] = np.frombuffer(part, dtype=np.uint8)
    return whole.tobytes()


def report(name: str, raw: bytes) -> None:
    """One line a method; the speed is of features that come out, on one core."""
    layouts = {"whole": (lambda data: [data], lambda parts: parts[0]), "planes": (planes, joined)}
    for method, (compress, decompress) in METHODS.items():
        for layout, (split, join) in layouts.items():
            stored = [compress(part) for part in split(raw)]
            seconds = []
            for _ in range(5):
                started = time.perf_counter()
                restored = join([decompress(part) for part in stored])
                seconds.append(time.perf_counter() - started)
            assert restored == raw
            rate = len(raw) / statistics.median(seconds) / 1e9
            print(f"| {name} | {method} | {layout} | {sum(map(len, stored)) / len(raw):.3f} | {rate:.2f} |", flush=True)


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        cache = FeatureCache.open(sys.argv[1])
        found = []
        for key in cache.keys()[:50]:
            features = cache.read(key)
            found += [as_bytes(features.image_embeds), as_bytes(features.deepstack_features)]
        name = "cache"
    else:
        found, name = random_tower_features(), "random weights, 8B's shapes"
    raw = b"".join(found)
    print("| features | method | bytes | size | read, GB/s |\n|---|---|---|---|---|")
    report(name, raw)


if __name__ == "__main__":
    main()
