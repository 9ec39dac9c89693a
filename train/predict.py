"""One image, one prompt, the full stock model: what a user sees when the adapter is deployed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cache.checkpoint import load_hf_config
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError, DataError
from cache.gpu_resize import decoded, pixel_values
from cache.image_processor_choice import any_gpu
from cache.preprocess import ImageProcessor, decode
from cache.records import Image, ImageRef, Record, Text, Turn
from train.adapter import NO_ADAPTER
from train.adapter_settings import require_usable
from train.chat import ChatEncoder
from train.config import EvalConfig, TrainConfig
from train.generate import answer_texts, greedy
from train.lora import load_adapter
from train.model import load_full_model, training_device
from train.sample import SampleImage, make_sample, widen

PLACEHOLDER = "<image>"


def predict(
    model: ModelConfig,
    cache: CacheConfig,
    train: TrainConfig,
    evaluation: EvalConfig,
    *,
    images: Sequence[Path],
    prompt: str,
    adapter: Path | None,
    system: str | None = None,
) -> str:
    """The answer of the stock model, tower included, to raw images.

    Args:
        images: files; they stand in front of the prompt unless it says `<image>` where they go.
        adapter: a PEFT adapter's folder.

    Raises:
        DataError: an image cannot be used, or the prompt has another number of `<image>`.
        ConfigError: the model or the adapter cannot be loaded.
    """
    record = prompt_record(images, prompt, system)
    if adapter is not None:
        require_usable(adapter, train.quantization, NO_ADAPTER)
    token = int(load_hf_config(model).image_token_id)
    encoder = ChatEncoder.from_checkpoint(model, token)
    inputs = _inputs(record, encoder, ImageProcessor.from_checkpoint(model, cache), cache.max_image_pixels)
    full = load_adapter(load_full_model(model, train, training_device(train)), adapter)
    full.eval()
    device = next(full.parameters()).device
    with torch.no_grad():
        output = full.generate(
            **{name: tensor.to(device) for name, tensor in inputs.items()},
            **greedy(encoder.tokenizer, evaluation.max_new_tokens),
        )
    return answer_texts(encoder.tokenizer, output[:, inputs["input_ids"].shape[1] :].tolist())[0]


def _inputs(
    record: Record, encoder: ChatEncoder, processor: ImageProcessor, max_image_pixels: int
) -> dict[str, torch.Tensor]:
    """What stock `generate` takes: pixels where they are made (cache.image_processor_device), the rest on the CPU."""
    pixels = [_pixels(ref, processor, max_image_pixels) for ref in record.images]
    grids = [(int(g[0]), int(g[1]), int(g[2])) for _, g in pixels]
    text = encoder.encode_prompt(record)
    parts = tuple(SampleImage("", grids[index], record.images[index]) for index in text.image_order)
    row = widen(
        make_sample(text, parts, merge_size=processor.merge_size, source="prompt"),
        image_token_id=encoder.image_token_id,
        merge_size=processor.merge_size,
    )
    input_ids = torch.from_numpy(row.input_ids)[None]
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if pixels:
        inputs |= {
            "pixel_values": torch.cat([pixels[i][0] for i in text.image_order]),
            "image_grid_thw": torch.stack([pixels[i][1] for i in text.image_order]),
            "mm_token_type_ids": (input_ids == encoder.image_token_id).to(torch.int32),
        }
    return inputs


def _pixels(ref: ImageRef, processor: ImageProcessor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    image = decode(ref.read(), where=ref.path, max_image_pixels=limit)
    if processor.device == "cpu":
        return processor(image, where=ref.path)
    device = any_gpu()
    content, grid = decoded(processor, image, where=ref.path)
    return pixel_values(processor, content, device, where=ref.path), grid


def prompt_record(images: Sequence[Path], prompt: str, system: str | None) -> Record:
    """A record without an answer."""
    for image in images:
        if not image.is_file():
            raise DataError("there is no such image file", where=str(image), do="check the path after --image")
    pieces = prompt.split(PLACEHOLDER)
    count = len(pieces) - 1
    if count == 0:
        content: list[Text | Image] = [*(Image(i) for i in range(len(images))), Text(prompt)]
    elif count != len(images):
        raise ConfigError(
            f"the prompt says {PLACEHOLDER} {count} times, and {len(images)} images were given",
            do=f"give --image once for each {PLACEHOLDER}, in their order, or leave {PLACEHOLDER} out",
        )
    else:
        content = [Text(pieces[0])]
        for index, piece in enumerate(pieces[1:]):
            content += [Image(index), Text(piece)]
    turns = [Turn("system", (Text(system),))] if system else []
    turns.append(Turn("user", tuple(part for part in content if isinstance(part, Image) or part.text)))
    refs = tuple(ImageRef(path=str(image), file=image) for image in images)
    return Record("prompt", "prompt", tuple(turns), refs)
