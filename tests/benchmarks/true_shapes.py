"""Checkpoints and images of the sizes that users have: Qwen3-VL-8B's and 32B's true shapes, random weights, 1036x1288
JPEGs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from PIL import Image as PilImage

from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.peer_speed import TEXT, VISION

HEIGHT, WIDTH = 1036, 1288
WORDS = (
    "polyp",
    "margin",
    "fold",
    "vessel",
    "mucosa",
    "bleeding",
    "instrument",
    "lumen",
    "red",
    "pale",
    "flat",
    "left",
)


TEXT_32B = TEXT | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
SIZES = {"8b": (TEXT, VISION), "32b": (TEXT_32B, VISION | {"out_hidden_size": 5120})}


def make_8b_checkpoint(folder: Path, *, device: str = "cuda") -> Path:
    """See `make_checkpoint`; 17.5 GB."""
    return make_checkpoint(folder, "8b", device=device)


def make_checkpoint(folder: Path, size: str, *, device: str = "cuda") -> Path:
    """Write a bfloat16 checkpoint with a model's shapes (32b: 67 GB), drawn on the device; tokenizer of the tiny model.

    One that is there is kept: the numbers are always the same.
    """
    if (folder / "config.json").is_file() and (folder / "model.safetensors.index.json").is_file():
        return folder
    from transformers import AutoConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    small = make_tiny_checkpoint(folder.with_name("tiny"))
    ids = AutoConfig.from_pretrained(small)
    text, vision = SIZES[size]
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        image_token_id=ids.image_token_id,
        video_token_id=ids.video_token_id,
        vision_start_token_id=ids.vision_start_token_id,
        vision_end_token_id=ids.vision_end_token_id,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    model.save_pretrained(folder, max_shard_size="5GB")
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def make_dataset(
    folder: Path,
    *,
    images: int,
    questions: int,
    prompt_words: int = 12,
    answer_words: int = 39,
    height: int = HEIGHT,
    width: int = WIDTH,
) -> Path:
    """Drawn JPEGs with several questions each, as flat rows; returns the JSONL file."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(images):
        name = f"images/{number:05d}.jpg"
        noise = torch.randint(0, 256, (130, 162, 3), generator=generator, dtype=torch.uint8)
        PilImage.fromarray(noise.numpy()).resize((width, height), PilImage.Resampling.BICUBIC).save(
            folder / name, quality=90
        )
        for _ in range(questions):
            picks = torch.randint(0, len(WORDS), (prompt_words + answer_words,), generator=generator).tolist()
            words = [WORDS[i] for i in picks]
            rows.append(
                {"image": name, "question": " ".join(words[:prompt_words]), "answer": " ".join(words[prompt_words:])}
            )
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file
