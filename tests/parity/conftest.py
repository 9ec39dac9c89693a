"""The oracle: the stock transformers model fed with pixels, and helpers that know nothing of the code under test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as PilImage
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.image_utils import load_image

from pipeline.config import PipelineConfig
from train.config import LoraConfig
from train.job import Job
from train.lora import add_lora


@dataclass
class Stock:
    """The stock full model with its own processors."""

    model: Any
    tokenizer: Any
    image_processor: Any

    @classmethod
    def load(cls, checkpoint: Path, max_pixels: int) -> Stock:
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        image_processor = AutoImageProcessor.from_pretrained(checkpoint)
        size = dict(image_processor.size)
        image_processor.size = {**size, "longest_edge": max_pixels}
        return cls(model, AutoTokenizer.from_pretrained(checkpoint), image_processor)

    def inputs(self, messages: list[dict[str, Any]], images: list[Path]) -> dict[str, torch.Tensor]:
        """What the family's processor makes of a conversation: widened placeholders, pixels, grids."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False)
        vision: dict[str, Any] = {}
        if images:
            vision = dict(self.image_processor(images=[load_image(str(i)) for i in images], return_tensors="pt"))
            for grid in vision["image_grid_thw"]:
                text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
            text = text.replace("<|placeholder|>", "<|image_pad|>")
        input_ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        image_token = self.model.config.image_token_id
        return {"input_ids": input_ids, "mm_token_type_ids": (input_ids == image_token).int(), **vision}

    def answer_mask(self, messages: list[dict[str, Any]], input_ids: torch.Tensor) -> torch.Tensor:
        """(S,) bool, True at the tokens of assistant turns, their <|im_end|> included, found by their markers."""
        start = self.tokenizer("<|im_start|>assistant\n")["input_ids"]
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids, mask, inside = input_ids[0].tolist(), [], False
        for place, token in enumerate(ids):
            mask.append(inside)
            if inside and token == end:
                inside = False
            if ids[max(0, place - len(start) + 1) : place + 1] == start:
                inside = True
        return torch.tensor(mask)


def job_of(config: PipelineConfig, *, from_cache: bool = True) -> Job:
    """The training job of a configuration."""
    c = config
    return Job(c.model, c.data, c.cache, c.train, c.eval, c.cache_dir, c.output_dir, from_cache)


def under_adapter(model: Any) -> Any:
    """In training, under the same adapter whatever the model, its B not zero, so that every gradient is alive."""
    wrapped = add_lora(model, LoraConfig(r=4), seed=7)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for p in wrapped.parameters() if p.requires_grad):
            parameter.normal_(0, 0.05, generator=dice)
    return wrapped.train()


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Three drawn images of different shapes."""
    folder = tmp_path / "images"
    folder.mkdir()
    files = []
    for number, size in enumerate([(96, 64), (64, 128), (160, 96)]):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (size[1] // 8, size[0] // 8, 3), generator=generator, dtype=torch.uint8)
        file = folder / f"{number}.png"
        PilImage.fromarray(pixels.numpy()).resize(size).save(file)
        files.append(file)
    return files
