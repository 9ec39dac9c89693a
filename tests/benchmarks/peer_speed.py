"""What others take for the same work: the stock model fed with pixels, alone and under Liger, and a simple cache.

    python -m tests.benchmarks.peer_speed [--liger-path FOLDER]

Nothing of this project runs here: transformers, PEFT and Liger only. Forward and backward at the 8B's true shapes with
random weights, LoRA rank 32 on all linear layers of the language model, one 1036x1288 image, 30 prompt and 90 answer
tokens a sample; medians of device times after warm-up. Where Liger does not import with the installed transformers,
--liger-path names a folder with versions that go together (`pip install --target FOLDER ...`); its rows run there.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

PROMPT, ANSWER = 30, 90
FULL, LOW = (64, 80), (28, 28)  # patches of a 1036x1288 and of a 448x448 image
HEAD = "| peer | ms / sample | peak GiB |\n|---|---|---|"


def main() -> None:
    """Print the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--liger-path", default="")
    parser.add_argument("--only", choices=["stock", "liger"], default=None)
    arguments = parser.parse_args()
    if arguments.only is None:
        print(HEAD)
        for part, path in (("stock", ""), ("liger", arguments.liger_path)):
            environment = os.environ | ({"PYTHONPATH": f"{path}:{Path.cwd()}"} if path else {})
            command = [sys.executable, "-m", "tests.benchmarks.peer_speed", "--only", part]
            subprocess.run(command, env=environment, check=True)
        return
    peer = Peer(liger=arguments.only == "liger")
    if arguments.only == "stock":
        peer.row("stock, batch 1, activation checkpointing, sdpa", peer.live(1, FULL), 1, checkpointing=True)
        peer.row("stock, batch 4, sdpa", peer.live(4, FULL), 4)
        peer.row("cached, padded, unshared, batch 4, sdpa", peer.cached(4), 4)
    else:
        for batch in (4, 8):
            peer.row(f"stock + Liger, batch {batch}", peer.live(batch, FULL), batch)
        peer.row("stock + Liger, 448x448, batch 32", peer.live(32, LOW), 32)


class Peer:
    """The stock model under LoRA, by the libraries alone."""

    def __init__(self, *, liger: bool) -> None:
        import transformers
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        print(
            f"| _torch {torch.__version__}, transformers {transformers.__version__}{', Liger' if liger else ''}_ | | |"
        )
        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

            apply_liger_kernel_to_qwen3_vl()
        config = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device("cuda"):
            stock = Qwen3VLForConditionalGeneration._from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.stock, self.config = stock.requires_grad_(False), config
        self.model = self._with_lora()

    def _with_lora(self) -> Any:
        from peft import LoraConfig, get_peft_model

        names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
        lora = LoraConfig(r=32, lora_alpha=64, target_modules=rf".*language_model.*\.({names})")
        model = get_peft_model(self.stock, lora).train()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def _batch(self, rows: int, patches: tuple[int, int]) -> dict[str, torch.Tensor]:
        tokens = patches[0] * patches[1] // 4
        ids = torch.randint(0, 150000, (rows, 7 + tokens + PROMPT + ANSWER), device="cuda")
        ids[:, 4] = self.config.vision_start_token_id
        ids[:, 5 : 5 + tokens] = self.config.image_token_id
        ids[:, 5 + tokens] = self.config.vision_end_token_id
        labels = ids.clone()
        labels[:, :-ANSWER] = -100
        kinds = (ids == self.config.image_token_id).int()
        grid = torch.tensor([[1, *patches]], device="cuda").repeat(rows, 1)
        return {"input_ids": ids, "labels": labels, "mm_token_type_ids": kinds, "image_grid_thw": grid}

    def live(self, rows: int, patches: tuple[int, int]) -> Callable[[], torch.Tensor]:
        """The tower runs in every step."""
        inputs = self._batch(rows, patches)
        pixels = torch.randn(rows * patches[0] * patches[1], 1536, device="cuda", dtype=torch.bfloat16)
        return lambda: self.model(**inputs, pixel_values=pixels, use_cache=False).loss

    def cached(self, rows: int) -> Callable[[], torch.Tensor]:
        """The tower's output is there; every question computes its image's tokens."""
        inputs = self._batch(rows, FULL)
        text = self.stock.model.language_model
        at_image = inputs["input_ids"] == self.config.image_token_id
        count = int(at_image.sum())
        features = [torch.randn(count, 4096, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(4)]
        positions, _ = self.stock.model.get_rope_index(
            inputs["input_ids"], image_grid_thw=inputs["image_grid_thw"], mm_token_type_ids=inputs["mm_token_type_ids"]
        )
        targets = inputs["labels"][:, 1:].reshape(-1)
        keep = targets != -100

        def loss() -> torch.Tensor:
            embeds = text.embed_tokens(inputs["input_ids"]).masked_scatter(at_image[..., None], features[0])
            hidden = text(
                inputs_embeds=embeds,
                position_ids=positions,
                visual_pos_masks=at_image,
                deepstack_visual_embeds=features[1:],
                use_cache=False,
            ).last_hidden_state
            at_targets = hidden[:, :-1].reshape(-1, hidden.shape[-1])[keep]
            return cross_entropy(self.stock.lm_head(at_targets).float(), targets[keep])

        return loss

    def row(self, name: str, loss: Callable[[], torch.Tensor], rows: int, *, checkpointing: bool = False) -> None:
        """Measure one way and print it."""
        if checkpointing:
            self.stock.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.stock.gradient_checkpointing_disable()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            times = [self._once(loss) for _ in range(6)][2:]
        except torch.OutOfMemoryError:
            print(f"| {name} | does not fit | |", flush=True)
            return
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"| {name} | {statistics.median(times) / rows:.1f} | {peak:.1f} |", flush=True)

    def _once(self, loss: Callable[[], torch.Tensor]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        loss().backward()
        end.record()
        torch.cuda.synchronize()
        self.model.zero_grad(set_to_none=True)
        return begin.elapsed_time(end)


TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
    "num_position_embeddings": 2304,
    "patch_size": 16,
}

if __name__ == "__main__":
    main()
