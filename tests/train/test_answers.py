"""The text of generated tokens, and points in it: the family's boxes are part of an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from train.generate import answer_texts
from train.metrics import exact_match, parse_point, point_hit


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


@pytest.mark.parametrize(
    "answer",
    [
        "Red and blue.",
        "<|box_start|>(12,30),(50,60)<|box_end|>",
        "<|object_ref_start|>the button<|object_ref_end|><|box_start|>(12,30)<|box_end|>",
        "<|quad_start|>(1,2),(3,4),(5,6),(7,8)<|quad_end|>",
        "<think>two</think> 2",
    ],
)
def test_an_answer_comes_back_as_the_dataset_has_it(tokenizer: Any, answer: str) -> None:
    ids = tokenizer(f"{answer}<|im_end|><|endoftext|><|endoftext|>").input_ids

    assert answer_texts(tokenizer, [ids])[0] == answer
    assert exact_match(answer_texts(tokenizer, [ids])[0], answer)


def test_what_frames_text_and_images_goes(tokenizer: Any) -> None:
    text = "<|im_start|>a<|vision_start|><|image_pad|><|video_pad|><|vision_pad|><|vision_end|>b<|im_end|>"

    assert answer_texts(tokenizer, [tokenizer(text).input_ids])[0] == "ab"


def test_the_vocabulary_is_not_asked_for(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast tokenizer with 150,000 tokens takes a tenth of a second to give it."""
    monkeypatch.setattr(type(tokenizer), "get_vocab", None)
    ids = tokenizer("two<|im_end|>").input_ids

    assert answer_texts(tokenizer, [ids] * 3) == ["two"] * 3


def test_a_point_in_a_box_is_a_point() -> None:
    boxed = "<|box_start|>(12,30)<|box_end|>"

    assert parse_point(boxed) == parse_point("(12,30)") == (12, 30)
    assert parse_point("<|box_start|>(12,30),(50,60)<|box_end|>") is None
    assert point_hit("(13,30)", boxed, 5)
    assert point_hit("<|box_start|>(13,30)<|box_end|>", boxed, 5)
    assert point_hit("<|box_start|>(93,30)<|box_end|>", "(12,30)", 5) is False
