"""Answers from the stock `generate`, with features in place of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache.features import VisionFeatures
from train.model import mm_encoder_outputs
from train.sample import Sequence as TokenSequence

# What the chat template and the model put around text and images.
_FRAMING = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[TokenSequence],
    features: Sequence[VisionFeatures],
    *,
    image_token_id: int,
    max_new_tokens: int,
) -> list[str]:
    """Greedy answers to a batch of prompts.

    Args:
        model: the stock class, bare or wrapped by PEFT, with or without its tower.
        prompts: widened sequences, each ending with the generation prompt.
        features: one for each image of the prompts, in order, on the model's device.

    Returns:
        One text a prompt, see answer_texts.
    """
    device = next(model.parameters()).device
    longest = max(len(prompt.input_ids) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), _padding(tokenizer), dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):  # left padding, so that every row generates at its end
        input_ids[row, longest - len(prompt.input_ids) :] = torch.from_numpy(prompt.input_ids)
        attention_mask[row, longest - len(prompt.input_ids) :] = 1
    is_image = input_ids == image_token_id
    vision: dict[str, Any] = {}
    if features:
        vision = {
            "mm_encoder_outputs": mm_encoder_outputs(features),
            "image_grid_thw": torch.stack([f.image_grid_thw for f in features]).to(device),
            "mm_token_type_ids": is_image.to(torch.int32).to(device),
        }
    output = model.generate(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        **greedy(tokenizer, max_new_tokens),
        **vision,
    )
    return answer_texts(tokenizer, output[:, longest:].tolist())


def answer_texts(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """The texts of generated tokens, without those that frame them.

    Boxes and references (`<|box_start|>`) stay: they are special to the tokenizer, and part of the answers that the
    family gives and that a dataset may hold. skip_special_tokens would take them out.
    """
    framing = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, *_FRAMING} - {None}
    # Not by the vocabulary: a fast tokenizer takes a tenth of a second to give that.
    ids_of = {token: tokenizer.convert_tokens_to_ids(token) for token in framing}
    # One that it does not have may come back as another's.
    dropped = {i for token, i in ids_of.items() if i is not None and tokenizer.convert_ids_to_tokens(i) == token}
    kept = [[token for token in ids if token not in dropped] for ids in answers]
    texts: list[str] = tokenizer.batch_decode(kept, skip_special_tokens=False)
    return texts


def greedy(tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    """Settings of the stock `generate` under which an answer is the same every time; sampling is taken back."""
    return {
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": _padding(tokenizer),
    }


def _padding(tokenizer: Any) -> int:
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)
