"""The 8B's vision tower alone, with random weights: as a module, and as a checkpoint that the cache stage takes."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from pipeline.demo.tiny_model import make_tiny_checkpoint
from tests.benchmarks.true_shapes import TEXT, VISION


def make_tower(device: str, *, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The stock vision model."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    torch.manual_seed(0)
    with torch.device(device):
        module: torch.nn.Module = Qwen3VLVisionModel._from_config(Qwen3VLVisionConfig(**VISION), dtype=dtype)
    return module.eval().requires_grad_(False)


def make_tower_checkpoint(folder: Path, *, device: str) -> Path:
    """A checkpoint in the real layout that lacks the language model's weights (1.2 GB); small files of the tiny one."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, Qwen3VLConfig

    small = make_tiny_checkpoint(folder.with_name("tiny"))
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"), dirs_exist_ok=True)
    ids = AutoConfig.from_pretrained(small)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
        **{name: getattr(ids, name) for name in names},
    )
    config.save_pretrained(folder)
    state = make_tower(device).state_dict()
    save_file({f"model.visual.{k}": v.cpu() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
