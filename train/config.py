"""Settings of training and evaluation. The docstring of a field is its entry in docs/configuration.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from cache.config import Section, UserPath
from train.best_metric import OF_ANSWERS, is_metric

DEFAULT_TOKENS_PER_PACK = 8192  # where nothing was calibrated


class LoraConfig(Section):
    """The adapter, on the language model only. Names as in peft.LoraConfig."""

    r: int = Field(default=16, gt=0)
    """Rank."""
    lora_alpha: float = Field(default=32, gt=0)
    """Scale: the update is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """`all-linear`: every linear layer of the language model but the output projection; or names such as
    `[q_proj, v_proj]`. Modules inside the vision tower are refused: its output is frozen."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead."""


class TrainConfig(Section):
    """Training. Names as in transformers.TrainingArguments where it has the setting."""

    split: str = "train"
    """Split to train on."""
    eval_split: str | None = "val"
    """Split for evaluation during training; skipped when `data.splits` does not name it."""
    lora: LoraConfig = LoraConfig()
    """The adapter."""
    adapter: UserPath | None = None
    """Folder of an adapter to start from, with the rank, scale and modules of `train.lora`; its weights are taken
    exactly, optimizer and schedule begin anew. Default: a fresh adapter, or in a later stage of an experiment that of
    the stage before."""
    quantization: Literal["none", "nf4", "fp8"] = "none"
    """`nf4`: QLoRA, the frozen base in 4 bits by bitsandbytes (double quantisation). `fp8`: the products with the
    frozen base in FP8, for speed, on GPUs that have it (Ada, Hopper and later); a product is then off by some 4 %, and
    docs/benchmarks/training.md says what that does to the loss."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the frozen base and of autocast. The adapter and the optimizer are kept in fp32."""
    tf32: bool = True
    """Allow TF32 products on GPUs that have them (only fp32 products are affected)."""
    effective_batch_size: int = Field(default=16, gt=0)
    """Samples per optimizer step, over all processes. What is in a step never depends on how it is split."""
    tokens_per_pack: Literal["auto"] | Annotated[int, Field(gt=0)] = "auto"
    """Samples are packed into rows of at most this many tokens (a longer sample has a row of its own). Bounds memory;
    does not change the result (with `lora.lora_dropout`, other numbers are drawn). `auto`: the first start tries on the
    GPU which rows fit and are fastest as they are, and the longest that fits with activation checkpointing, takes the
    faster, and keeps the choice in the run folder (calibration.json); 8192 on a CPU."""
    order: Literal["sample", "image", "file"] = "image"
    """`sample`: rows in random order. `image`: the rows of one image come together, images in random order, so that a
    step reads an image once for all its questions; steps are less random then. `file`: as the rows stand in the file,
    every epoch, for data that was put in an order on purpose (docs/data.md)."""
    share_prefixes: bool = True
    """Samples of a step whose tokens and images are identical up to some point share that prefix: it is computed once.
    Does not change the result, except with `lora.lora_dropout` above 0: what is dropped in a shared prefix is drawn
    once for all its samples, and a run that goes on with another value draws other numbers from there on."""
    num_train_epochs: float = Field(default=3.0, gt=0)
    """Passes over the data."""
    max_steps: int = -1
    """Optimizer steps in all; overrides num_train_epochs when positive."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
    ] = "cosine"
    """Schedule of the learning rate after the warm-up, transformers' names."""
    warmup_steps: float = Field(default=0.03, ge=0)
    """Steps of linear warm-up; below 1, that share of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 turns clipping off."""
    optim: str = "adamw_torch_fused"
    """Optimizer, any name that transformers knows."""
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"
    """How packs attend. `flash`: FlashAttention-4, on Hopper GPUs where `vision-once[flash]` is installed; the fastest,
    but two runs differ in the last bits. `flex`: torch's flex_attention, on any GPU. `sdpa`: a dense mask. `auto`: the
    first of them that runs here."""
    torch_compile: bool | None = None
    """Compile the decoder layers: costs time at the start and saves it in every step. Default: where there is a GPU."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: slower, less memory. Default: as `tokens_per_pack: auto` finds best,
    else false."""
    dataloader_num_workers: int = Field(default=2, ge=0)
    """Processes that read features and build packs."""
    dataloader_pin_memory: bool = True
    """Page-locked buffers, where there is a GPU."""
    dataloader_prefetch_factor: int = Field(default=2, gt=0)
    """Steps that each worker prepares ahead."""
    dataloader_persistent_workers: bool = True
    """Keep the workers from epoch to epoch."""
    logging_steps: int = Field(default=1, gt=0)
    """Steps between log lines."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Steps between evaluations. Default: once an epoch."""
    save_steps: int | None = Field(default=None, gt=0)
    """Steps between checkpoints. Default: once an epoch."""
    save_total_limit: int | None = Field(default=3, gt=0)
    """How many checkpoints are kept."""
    load_best_model_at_end: bool = False
    """Save the adapter of the best evaluation instead of the last one. Evaluations and checkpoints must coincide."""
    metric_for_best_model: str = "loss"
    """What `best` means: `loss`, of staged answers also `loss_<stage>`, or `exact_match`, `token_f1`, `point_accuracy`,
    for which each evaluation generates answers, which takes longer. Losses are best when low, the others when high."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of the adapter, the order of samples and dropout."""
    resume: bool = True
    """Go on from the last checkpoint in the run folder when there is one."""
    report_to: tuple[Literal["tensorboard", "wandb", "none"], ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl and the terminal."""
    fsdp: Literal["none", "full_shard"] = "none"
    """`full_shard`: several processes divide the frozen base among them, for a model that does not fit one GPU
    (docs/distributed.md). Does not change the result."""
    device: Literal["auto", "cpu"] = "auto"
    """`cpu` keeps off a GPU that is there."""

    @field_validator("report_to")
    @classmethod
    def _none_alone(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "none" in value and len(value) > 1:
            raise ValueError("none stands alone")
        return value

    @field_validator("metric_for_best_model")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if not is_metric(value):
            raise ValueError(f"must be loss, loss_<stage>, {', '.join(OF_ANSWERS[:-1])} or {OF_ANSWERS[-1]}")
        return value

    @field_validator("max_steps")
    @classmethod
    def _steps(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError("must be positive, or -1 to go by num_train_epochs")
        return value

    @model_validator(mode="after")
    def _parts_go_together(self) -> TrainConfig:
        if self.attention == "flash" and self.precision == "fp32":
            raise ValueError(
                "attention: flash computes in bf16 or fp16; set precision to one of them, or attention: auto"
            )
        if self.quantization == "fp8" and self.precision == "fp32":
            raise ValueError("quantization: fp8 gives its products in bf16 or fp16; set precision to one of them")
        if self.fsdp != "none" and self.quantization != "none":
            raise ValueError(
                f"fsdp: {self.fsdp} cannot divide a base in {self.quantization}; use one of them, not both"
            )
        return self

    @model_validator(mode="after")
    def _best_needs_saves(self) -> TrainConfig:
        if self.load_best_model_at_end and self.eval_split is None:
            raise ValueError("load_best_model_at_end needs an eval_split")
        evals, saves = self.eval_steps, self.save_steps
        aligned = (saves % evals == 0) if evals and saves else evals == saves
        if self.load_best_model_at_end and not aligned:
            raise ValueError(
                f"load_best_model_at_end needs save_steps ({saves}) to be a multiple of eval_steps ({evals})"
            )
        return self


class EvalConfig(Section):
    """Evaluation by generation."""

    max_new_tokens: int = Field(default=128, gt=0)
    """Longest answer in tokens."""
    batch_size: int = Field(default=8, gt=0)
    """Samples that generate at once."""
    point_distance: float = Field(default=5.0, gt=0)
    """A point answer counts as right within this distance, in the answer's own units (e.g. percent of the image)."""
    limit: int | None = Field(default=None, gt=0)
    """Evaluate the first so many samples only, loss and answers both; in training where answers are generated."""
