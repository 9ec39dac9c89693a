"""The sections of the configuration that training and evaluation need, and which of them decide the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.config import CacheConfig, DataConfig, ModelConfig
from train.config import EvalConfig, TrainConfig

# Settings that may change between two starts of one run: they do not decide what is learned.
_FREE = {
    "tokens_per_pack",
    "share_prefixes",
    "attention",
    "torch_compile",
    "gradient_checkpointing",
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "dataloader_prefetch_factor",
    "dataloader_persistent_workers",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "num_train_epochs",
    "max_steps",
    "resume",
    "report_to",
    "device",
    "tf32",
    "eval_split",
}


@dataclass(frozen=True, slots=True)
class Job:
    """The sections of the configuration that a run needs.

    Attributes:
        cache_dir: the cache's folder.
        output_dir: the run folder.
        from_cache: train from the cache; else the tower runs in every step.
    """

    model: ModelConfig
    data: DataConfig
    cache: CacheConfig
    train: TrainConfig
    eval: EvalConfig
    cache_dir: Path
    output_dir: Path
    from_cache: bool

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, flat; what a resumed run must agree on."""
        train = {k: v for k, v in self.train.model_dump(mode="json").items() if k not in _FREE}
        lora = train.pop("lora")
        return {
            "model": self.model.name_or_path,
            "revision": self.model.revision,
            "from_cache": self.from_cache,
            "data.train": self.data.splits[self.train.split].path if self.train.split in self.data.splits else None,
            **{f"cache.{k}": getattr(self.cache, k) for k in ("dtype", "min_pixels", "max_pixels")},
            **{f"train.{k}": v for k, v in train.items()},
            **{f"train.lora.{k}": v for k, v in lora.items()},
        }

    def length(self) -> dict[str, float]:
        """How long the run is to be; a longer one goes on from the last checkpoint."""
        return {"num_train_epochs": self.train.num_train_epochs, "max_steps": self.train.max_steps}
