"""A tiny Qwen3-VL checkpoint with random weights in the real Hugging Face layout.

Everything loads it by path as it would load `Qwen/Qwen3-VL-8B-Instruct`, without a model hub. It has what the family
has: DeepStack levels, interleaved M-RoPE, a byte-level BPE tokenizer with the family's special tokens, its template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cache.errors import ConfigError
from pipeline.demo.corpus import CORPUS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Family = Literal["dense", "moe"]

# In the order of the family's own vocabulary, where they follow the merges.
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
# Tokens of their own, but text like any other: decoding with skip_special_tokens keeps them.
MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
PATCH_SIZE = 16
MERGE_SIZE = 2
MAX_POSITIONS = 32768
_VOCABULARY = 1536  # byte symbols and merges, before the special tokens


def make_tiny_checkpoint(
    folder: Path, *, seed: int = 0, family: Family = "dense", tie_word_embeddings: bool = False
) -> Path:
    """Write a tiny checkpoint to `folder` and return `folder`.

    Hidden size 128, 4 layers, a tower of 4 blocks of width 64 with 3 DeepStack levels; about 2 million float32
    parameters. A merged image token covers 32x32 pixels. The same arguments give the same bytes.

    Args:
        folder: where the files go; made if missing, files of the same names are replaced.
        seed: of the weights; the tokenizer is always the same.
        family: `dense` is `qwen3_vl`, `moe` is `qwen3_vl_moe` with 4 experts of which 2 are active.
        tie_word_embeddings: whether the vocabulary projection is the input embedding.

    Raises:
        ConfigError: `family` is neither.
    """
    if family not in ("dense", "moe"):
        raise ConfigError(f"unknown model family {family!r}", do="use 'dense' or 'moe'")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    tokenizer.save_pretrained(folder)
    model = _make_model(tokenizer, family=family, tie_word_embeddings=tie_word_embeddings)
    _draw_weights(model, seed)
    model.save_pretrained(folder)
    _write_processor_settings(folder)
    return folder


def _make_tokenizer() -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    learner = Tokenizer(BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    # Sorted, because the alphabet comes as a set and its order decides the ids.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, min_frequency=1, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator(CORPUS.strip().splitlines(), trainer)
    learned = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        model_max_length=MAX_POSITIONS,
    )
    # Set after the fact, so that the ids keep the order of SPECIAL_TOKENS.
    tokenizer.eos_token = "<|im_end|>"  # noqa: S105
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _text_settings(vocabulary: int, family: Family, tie_word_embeddings: bool) -> dict[str, Any]:
    head_dim = 32
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": tie_word_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [6, 5, 5],  # sums to head_dim / 2, the rotated frequency pairs
            "mrope_interleaved": True,
        },
    }
    if family == "moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    return settings


def _vision_settings(out_hidden_size: int) -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE_SIZE,
        "out_hidden_size": out_hidden_size,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [0, 1, 2],
    }


def _make_model(tokenizer: PreTrainedTokenizerBase, *, family: Family, tie_word_embeddings: bool) -> PreTrainedModel:
    import torch
    import transformers

    name = "Qwen3VLMoe" if family == "moe" else "Qwen3VL"
    token_id = tokenizer.convert_tokens_to_ids
    # The projection is wider than the vocabulary, as in the released checkpoints.
    text = _text_settings(-(-len(tokenizer) // 128) * 128, family, tie_word_embeddings)
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"bos_token_id": token_id("<|endoftext|>"), "eos_token_id": token_id("<|im_end|>")},
        vision_config=_vision_settings(text["hidden_size"]),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=tie_word_embeddings,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # the class draws weights that are replaced; the caller's generator stays
        model: PreTrainedModel = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        bos_token_id=token_id("<|endoftext|>"),
        eos_token_id=[token_id("<|im_end|>"), token_id("<|endoftext|>")],
        pad_token_id=token_id("<|endoftext|>"),
    )
    return model


def _draw_weights(model: PreTrainedModel, seed: int) -> None:
    # The class's own 0.02 leaves a tower of this width nearly silent: an adapter has nothing to learn from.
    import torch

    generator = torch.Generator().manual_seed(seed)
    layers = model.config.text_config.num_hidden_layers
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _spread(name, parameter, layers), generator=generator)


def _spread(name: str, weight: torch.Tensor, layers: int) -> float:
    if name.endswith("pos_embed.weight"):
        # As loud as the patches they are added to, or the features do not say where in the image something is.
        return 1.0
    # Experts are stacked as (experts, out, in); every other weight sums over all its axes but the first.
    fan_in = weight.shape[-1] if ".experts." in name else weight[0].numel()
    # Random layers only blur what they are given: what each adds to the residual stream is kept small, as GPT-2 does.
    adds = name.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.experts.down_proj"))
    return float((fan_in * (2 * layers if adds else 1)) ** -0.5)


def _write_processor_settings(folder: Path) -> None:
    shared = {
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = {
        # The released checkpoints enlarge what has fewer than 256x256 pixels; here that is most of the drawings.
        "size": {"shortest_edge": 64 * 64, "longest_edge": 16_777_216},
        **shared,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    }
    video = {
        "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
        **shared,
        "video_processor_type": "Qwen3VLVideoProcessor",
    }
    for name, settings in (("preprocessor_config.json", image), ("video_preprocessor_config.json", video)):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
