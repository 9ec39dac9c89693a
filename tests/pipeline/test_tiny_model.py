"""The tiny checkpoint stands in for a released one: the stock classes must not be able to tell."""

from __future__ import annotations

import hashlib
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from cache.errors import ConfigError
from pipeline.demo.tiny_model import MARKUP_TOKENS, SPECIAL_TOKENS, make_tiny_checkpoint

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("moe"), family="moe", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def tokenizer(dense: Path) -> Any:
    return AutoTokenizer.from_pretrained(dense)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def inputs(folder: Path, colour: tuple[int, int, int] = (255, 0, 0)) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pixels = AutoImageProcessor.from_pretrained(folder)(Image.new("RGB", (128, 96), colour), return_tensors="pt")
    tokens = int(pixels["image_grid_thw"].prod()) // 4
    content = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "text", "text": "What colour is it?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * tokens), return_tensors="pt").input_ids
    image = ids == AutoConfig.from_pretrained(folder).image_token_id
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": image.int(), **pixels}


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights_only(dense: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    again = digests(make_tiny_checkpoint(tmp_path / "again"))
    other = digests(make_tiny_checkpoint(tmp_path / "other", seed=1))
    first = digests(dense)
    assert again == first
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}
    assert torch.equal(torch.get_rng_state(), state)


def test_files_are_those_of_a_released_checkpoint(dense: Path) -> None:
    assert {path.name for path in dense.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"),
        *("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    }


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sparse"):
        make_tiny_checkpoint(tmp_path, family="sparse")  # type: ignore[arg-type]


def test_special_ids_of_the_config_are_the_tokenizers(dense: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(dense)
    token_id = tokenizer.convert_tokens_to_ids
    assert config.image_token_id == token_id("<|image_pad|>")
    assert config.video_token_id == token_id("<|video_pad|>")
    assert config.vision_start_token_id == token_id("<|vision_start|>")
    assert config.vision_end_token_id == token_id("<|vision_end|>")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ordered = [token_id(token) for token in SPECIAL_TOKENS + MARKUP_TOKENS]
    assert ordered == list(range(len(tokenizer) - len(ordered), len(tokenizer)))
    assert len(tokenizer) <= config.text_config.vocab_size
    assert 1000 <= len(tokenizer) <= 2000


def test_tokenizer_is_the_familys(tokenizer: Any) -> None:
    assert tokenizer.is_fast
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert tokenizer.tokenize("Click (25, 50) red") == [
        "Click",
        *("Ġ(", "2", "5", ",", "Ġ", "5", "0", ")"),
        "Ġred",
    ]
    assert tokenizer.tokenize("a<|im_start|>b") == ["a", "<|im_start|>", "b"]


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    # The family's tokenizer composes characters first (NFC); past that nothing may be lost.
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == unicodedata.normalize("NFC", text)


def test_template_system_and_many_turns(tokenizer: Any) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(turns, tokenize=False) == expected
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert prompt == expected + "<|im_start|>assistant\n"


def test_template_keeps_images_at_their_place(tokenizer: Any) -> None:
    content = [
        {"type": "text", "text": "Before "},
        {"type": "image"},
        {"type": "text", "text": " between "},
        {"image": "a.png"},
        {"image_url": "b.png"},
        {"type": "video"},
        {"type": "text", "text": " after"},
    ]
    turns = [{"role": "user", "content": content}]
    video = IMAGE.replace("image", "video")
    assert (
        tokenizer.apply_chat_template(turns, tokenize=False)
        == f"<|im_start|>user\nBefore {IMAGE} between {IMAGE}{IMAGE}{video} after<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_vision_id=True) == (
        f"<|im_start|>user\nBefore Picture 1: {IMAGE} between Picture 2: {IMAGE}Picture 3: {IMAGE}"
        f"Video 1: {video} after<|im_end|>\n"
    )


def test_template_tools(tokenizer: Any) -> None:
    click = {"function": {"name": "click", "arguments": {"x": 1}}}
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Act."}]},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Ok", "tool_calls": [click, {"name": "stop", "arguments": "{}"}]},
        {"role": "tool", "content": "done"},
        {"role": "tool", "content": [{"type": "image"}]},
    ]
    tools = [{"type": "function", "function": {"name": "click"}}]
    assert tokenizer.apply_chat_template(turns, tools=tools, tokenize=False) == (
        "<|im_start|>system\nAct.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "click"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nGo<|im_end|>\n"
        '<|im_start|>assistant\nOk\n<tool_call>\n{"name": "click", "arguments": {"x": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\n{IMAGE}\n</tool_response>"
        "<|im_end|>\n"
    )


def test_image_processor_keeps_small_drawings_at_their_size(dense: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(dense)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8))
    out = processor(noise, return_tensors="pt")
    assert out["image_grid_thw"].tolist() == [[1, 6, 8]]
    assert out["pixel_values"].shape == (48, 3 * 2 * 16 * 16)
    assert out["pixel_values"].abs().max() <= 1


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_stock_class_runs_and_generates(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == {"dense": "Qwen3VL", "moe": "Qwen3VLMoe"}[name] + "ForConditionalGeneration"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (name == "moe")
    red, blue = inputs(folder), inputs(folder, (0, 0, 255))
    with torch.inference_mode():
        seen, other = model(**red).logits, model(**blue).logits
        features = model.model.get_image_features(red["pixel_values"], red["image_grid_thw"])
        written = model.generate(**red, max_new_tokens=4)
    assert seen.shape == (*red["input_ids"].shape, model.config.text_config.vocab_size)
    # Loud enough for an adapter: the picture moves the logits by a good part of their own scale.
    assert (seen - other)[:, -1].std() > 0.1 * seen[:, -1].std()
    assert len(features.deepstack_features) == 3
    assert features.pooler_output[0].shape == (12, 128)
    assert written.shape[1] > red["input_ids"].shape[1]
