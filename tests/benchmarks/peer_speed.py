"""What others take for the same work: the stock model fed with pixels, alone and under Liger, and a simple cache.

    python -m tests.benchmarks.peer_speed [--liger-path FOLDER]
    python -m tests.benchmarks.peer_speed --tiny        # on a CPU, to try the command

Nothing of this project runs here: transformers, PEFT and Liger only. Forward and backward at the 8B's true shapes with
random weights, LoRA rank 32 on all linear layers of the language model, one 1036x1288 image, 30 prompt and 90 answer
tokens a sample; medians of device times after warm-up. Where Liger does not import with the installed transformers,
--liger-path names a folder with versions that go together (`pip install --target FOLDER ...`); its rows run there.
Prints a JSON line for each row as it comes, also for one that does not fit or cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import cross_entropy

from tests.benchmarks.device_clock import clean, milliseconds, peak_gib
from tests.benchmarks.kept_rows import DOES_NOT_FIT, Row

PROMPT, ANSWER = 30, 90
FULL, LOW = (64, 80), (28, 28)  # patches of a 1036x1288 and of a 448x448 image
LIBRARIES = ("torch", "transformers", "peft")


@dataclass(frozen=True)
class PeerCase:
    """One way of training: with what, samples in a batch, patches of an image."""

    library: Literal["stock", "liger"]
    batch: int
    patches: tuple[int, int] = FULL
    cached: bool = False
    checkpointing: bool = False

    @property
    def kind(self) -> Literal["peer", "low"]:
        """See Row."""
        return "peer" if self.patches == FULL else "low"


PEERS = {
    "stock, batch 1, activation checkpointing, sdpa": PeerCase("stock", 1, checkpointing=True),
    "stock, batch 4, sdpa": PeerCase("stock", 4),
    "cached, padded, unshared, batch 4, sdpa": PeerCase("stock", 4, cached=True),
    **{f"stock + Liger, batch {batch}": PeerCase("liger", batch) for batch in (4, 8, 12, 16)},
    "stock + Liger, 448x448, batch 32": PeerCase("liger", 32, LOW),
}


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--liger-path", default="")
    parser.add_argument("--rows", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--here", action="store_true", help="in this process; all rows of one library")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rows = measured(options.rows, tiny=options.tiny)
    if not options.here:
        rows = peer_rows(options.rows, options.liger_path, tiny=options.tiny)
    for row in rows:
        print(json.dumps(asdict(row)), flush=True)


def peer_rows(names: Sequence[str], liger_path: str, *, tiny: bool) -> Iterator[Row]:
    """Measure peers, each library in a process of its own; what cannot run is a row with the reason."""
    for library, path in (("stock", ""), ("liger", liger_path)):
        wanted = [name for name in names if PEERS[name].library == library]
        if not wanted:
            continue
        command = [sys.executable, "-m", "tests.benchmarks.peer_speed", "--here", "--rows", *wanted]
        environment = os.environ | ({"PYTHONPATH": f"{path}:{Path.cwd()}"} if path else {})
        yield from rows_of([*command, *["--tiny"] * tiny], wanted, environment)


def rows_of(command: Sequence[str], wanted: Sequence[str], environment: dict[str, str]) -> Iterator[Row]:
    """The rows that a process prints, and one with its exit code for each that it owes."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        owed = list(wanted)
        for line in process.stdout:
            if line.startswith('{"name"'):  # libraries print, too
                row = Row(**json.loads(line))
                owed.remove(row.name)
                yield row
    for name in owed:
        yield Row(name, PEERS[name].kind, None, f"not run: its process ended with {process.returncode}")


def measured(names: Sequence[str], *, tiny: bool) -> Iterator[Row]:
    """Measure peers of one library in this process."""
    (library,) = {PEERS[name].library for name in names}
    libraries = [*LIBRARIES, *["liger-kernel"] * (library == "liger")]
    details = {"versions": {name: _version(name) for name in libraries}}
    try:
        peer = Peer(liger=library == "liger", tiny=tiny)
    except Exception as error:  # whatever it is, the other rows can be measured
        reason = f"not run: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        yield from (Row(name, PEERS[name].kind, None, reason, details) for name in names)
        return
    for name in names:
        yield peer.row(name, PEERS[name], details)


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"


class Peer:
    """The stock model under LoRA, by the libraries alone."""

    def __init__(self, *, liger: bool, tiny: bool) -> None:
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        if liger:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

            apply_liger_kernel_to_qwen3_vl()
        text, vision = (TEXT | TINY_TEXT, VISION | TINY_VISION) if tiny else (TEXT, VISION)
        ids = TINY_IDS if tiny else {}
        config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        self.device, self.tiny = torch.device("cpu" if tiny else "cuda"), tiny
        torch.manual_seed(0)
        with self.device:
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
        ids = torch.randint(
            0, TINY_WORDS if self.tiny else 150000, (rows, 7 + tokens + PROMPT + ANSWER), device=self.device
        )
        ids[:, 4] = self.config.vision_start_token_id
        ids[:, 5 : 5 + tokens] = self.config.image_token_id
        ids[:, 5 + tokens] = self.config.vision_end_token_id
        labels = ids.clone()
        labels[:, :-ANSWER] = -100
        kinds = (ids == self.config.image_token_id).int()
        grid = torch.tensor([[1, *patches]], device=self.device).repeat(rows, 1)
        return {"input_ids": ids, "labels": labels, "mm_token_type_ids": kinds, "image_grid_thw": grid}

    def live(self, rows: int, patches: tuple[int, int]) -> Callable[[], torch.Tensor]:
        """The tower runs in every step."""
        inputs = self._batch(rows, patches)
        pixels = torch.randn(rows * patches[0] * patches[1], 1536, device=self.device, dtype=torch.bfloat16)
        return lambda: self.model(**inputs, pixel_values=pixels, use_cache=False).loss

    def cached(self, rows: int, patches: tuple[int, int]) -> Callable[[], torch.Tensor]:
        """The tower's output is there; every question computes its image's tokens."""
        inputs = self._batch(rows, patches)
        text = self.stock.model.language_model
        at_image = inputs["input_ids"] == self.config.image_token_id
        count, width = int(at_image.sum()), self.config.text_config.hidden_size
        features = [torch.randn(count, width, device=self.device, dtype=torch.bfloat16) * 0.02 for _ in range(4)]
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

    def row(self, name: str, case: PeerCase, details: dict[str, Any]) -> Row:
        """Measure one way."""
        if case.checkpointing:
            self.stock.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.stock.gradient_checkpointing_disable()
        clean(self.device)
        try:
            patches = (4, 4) if self.tiny else case.patches
            loss = (self.cached if case.cached else self.live)(case.batch, patches)
            times = [self._once(loss) for _ in range(6)][2:]
        except torch.OutOfMemoryError:
            self.model.zero_grad(set_to_none=True)
            return Row(name, case.kind, None, DOES_NOT_FIT, details)
        peak = {"peak_gib": peak_gib(self.device), "samples": case.batch}
        return Row(name, case.kind, statistics.median(times) / case.batch, details=details | peak)

    def _once(self, loss: Callable[[], torch.Tensor]) -> float:
        taken = milliseconds(self.device, lambda: loss().backward())
        self.model.zero_grad(set_to_none=True)
        return taken


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
# For --tiny.
TINY_WORDS = 500
TINY_IDS = {
    name: TINY_WORDS + number
    for number, name in enumerate(("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"))
}
TINY_TEXT = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [4, 2, 2]},
}
TINY_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1, 2],
}

if __name__ == "__main__":
    main()
