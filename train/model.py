"""The stock model class: without its tower for training, whole for prediction. No line of its layers is ours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import SafetensorError

from cache.checkpoint import load_hf_config
from cache.config import ModelConfig
from cache.errors import ConfigError, ResourceError
from cache.features import VisionFeatures
from train.attention import Kind, attention_kind, register
from train.config import TrainConfig
from train.fp8 import require_fp8, to_fp8
from train.head import Targets, weighted_loss
from train.image_positions import at_positions, hidden_states
from train.last_layer import reading_some
from train.lora_scale import scale_between
from train.sharding import PLAN, gather_in_forward, is_sharded, loading_arguments

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VISION_TOWER = "visual"
RECOMPILE_LIMIT = 32


def training_device(config: TrainConfig) -> torch.device:
    """Where training runs. With several processes, torchrun's launcher has chosen the GPU of each."""
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The context in which the model runs outside of the Trainer, the same that the Trainer uses inside."""
    dtype = PRECISIONS[config.precision]
    return torch.autocast(device.type, dtype=dtype, enabled=config.precision != "fp32")


def prepare_for_training(model: Any, config: TrainConfig, device: torch.device) -> None:
    """Set a PEFT model up for speed, in place. The numbers are those of the same operations in the same dtypes."""
    if config.precision != "fp32" and device.type == "cuda":
        for module in model.modules():
            # Under autocast the products run in low precision anyway; PEFT's own cast of every input to the adapter's
            # fp32 would only be undone by it.
            if hasattr(module, "lora_A"):
                module.cast_input_dtype_enabled = False
    scale_between(model)
    wanted = config.torch_compile if config.torch_compile is not None else device.type == "cuda"
    if wanted:
        # All layers share one limit. Two kinds of them have more than 8 graphs in training, evaluation and generation.
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, RECOMPILE_LIMIT)
        for layer in model.get_base_model().model.language_model.layers:
            layer.compile()


def load_language_model(model: ModelConfig, config: TrainConfig, device: torch.device) -> Any:
    """The stock class with `model.visual` set to None; the tower's weights are skipped when the checkpoint is read.

    transformers builds the module tree on the meta device, so the tower never takes memory.

    Returns:
        A frozen transformers model on `device`.

    Raises:
        ConfigError: the checkpoint cannot be loaded.
        ResourceError: it does not fit the device's memory.
    """
    if config.quantization == "fp8":
        require_fp8(device)
    stock = _stock_class(model)

    class WithoutTower(stock):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_unexpected = [rf"model\.{VISION_TOWER}\..*"]  # noqa: RUF012

        def __init__(self, hf_config: Any) -> None:
            super().__init__(hf_config)
            self.model.visual = None
            self.model.language_model.__class__ = at_positions(type(self.model.language_model))
            last = self.model.language_model.layers[-1]
            last.__class__ = reading_some(type(last))
            if is_sharded(config):
                self.fsdp_plan = PLAN

        @functools.wraps(stock.forward)  # transformers asks for the names of its arguments
        def forward(self, *args: Any, targets: Targets | None = None, **kwargs: Any) -> Any:
            """The stock forward; given targets, their loss instead of logits, which may not fit the memory."""
            if targets is None:
                return super().forward(*args, **kwargs)
            read = targets.positions
            hidden = hidden_states(self.model.language_model, read_positions=read, **kwargs)
            return weighted_loss(self.lm_head, hidden, targets)

    # What is saved later names its class, and that must be one that others have.
    WithoutTower.__name__ = stock.__name__
    WithoutTower.__qualname__ = stock.__qualname__
    attention = attention_kind(config, device)
    loaded = _load(WithoutTower, model, config, device, attention, **loading_arguments(config))
    if is_sharded(config):
        gather_in_forward(loaded)
    return loaded


def load_full_model(model: ModelConfig, config: TrainConfig, device: torch.device) -> Any:
    """The stock model, tower included, frozen, on `device`. Raises as `load_language_model`."""
    if config.quantization == "fp8":
        require_fp8(device)
    return _load(_stock_class(model), model, config, device, "sdpa")  # it is given no packs


def mm_encoder_outputs(features: Sequence[VisionFeatures]) -> dict[str, Any] | None:
    """What `forward` and `generate` of the stock class take in place of pixels; None when there is no image.

    Args:
        features: one for each image in the order of its placeholders, over the rows of the batch.
    """
    if not features:
        return None
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    levels = features[0].deepstack_features.shape[0]
    return {
        "image": BaseModelOutputWithDeepstackFeatures(
            pooler_output=tuple(f.image_embeds for f in features),
            deepstack_features=[tuple(f.deepstack_features[level] for f in features) for level in range(levels)],
        )
    }


def _stock_class(model: ModelConfig) -> Any:
    from transformers import AutoModelForImageTextToText

    hf_config = load_hf_config(model)
    try:
        return AutoModelForImageTextToText._model_mapping[type(hf_config)]
    except KeyError:
        raise ConfigError(
            f"transformers has no image-text model for {hf_config.model_type}",
            where=model.name_or_path,
            do="use a model of the Qwen3-VL family",
        ) from None


def _load(
    kind: Any, model: ModelConfig, config: TrainConfig, device: torch.device, attention: Kind, **arguments: Any
) -> Any:
    attn_implementation = register(attention)
    try:
        loaded, report = kind.from_pretrained(
            model.name_or_path,
            revision=model.revision,
            dtype=PRECISIONS[config.precision],
            attn_implementation=attn_implementation,
            quantization_config=_quantization(config),
            device_map={"": device},
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **arguments,
        )
    except torch.OutOfMemoryError as error:
        raise _too_large() from error
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load the model: {error}", where=model.name_or_path, do="copy or download the checkpoint again"
        ) from error
    if report["missing_keys"]:  # transformers would go on with random numbers in their place
        raise ConfigError(
            f"the checkpoint lacks {len(report['missing_keys'])} tensors, e.g. {min(report['missing_keys'])}",
            where=model.name_or_path,
            do="copy or download the checkpoint again",
        )
    if config.quantization == "fp8":
        try:
            to_fp8(loaded.model.language_model)
        except torch.OutOfMemoryError as error:
            raise _too_large() from error
    return loaded.requires_grad_(False)


def _too_large() -> ResourceError:
    return ResourceError(
        "the language model does not fit the GPU's memory", do="set train.quantization: nf4, or use a larger GPU"
    )


def _quantization(config: TrainConfig) -> Any:
    if config.quantization != "nf4":
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=PRECISIONS[config.precision],
        llm_int8_skip_modules=["lm_head", VISION_TOWER],
    )
