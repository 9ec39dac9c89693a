"""The sections of the configuration that training and evaluation need, and which of them decide the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.config import CacheConfig, DataConfig, ModelConfig
from train.adapter import WEIGHTS_FILE, adapter_digest
from train.config import EvalConfig, TrainConfig
from train.run_folder import ADAPTER, read_run

# Settings that may change between two starts of one run: they do not decide what is learned.
_FREE = {
    "tokens_per_pack",
    "share_prefixes",
    "attention",
    "torch_compile",
    "gradient_checkpointing",
    "fsdp",
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

# What decides which records are learned, and which of their text.
_DATA = ("format", "stage_format", "max_length", "on_bad_record")
# What decides an image's features.
_CACHE = ("dtype", "min_pixels", "max_pixels", "tower", "attn_implementation", "patches_per_batch")


@dataclass(frozen=True, slots=True)
class Job:
    """The sections of the configuration that a run needs.

    Attributes:
        cache_dir: the cache's folder, or an address (see cache.remote).
        output_dir: the run folder.
        from_cache: train from the cache; else the tower runs in every step.
    """

    model: ModelConfig
    data: DataConfig
    cache: CacheConfig
    train: TrainConfig
    eval: EvalConfig
    cache_dir: Path | str
    output_dir: Path
    from_cache: bool

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result, flat; what a resumed run must agree on."""
        train = {k: v for k, v in self.train.model_dump(mode="json").items() if k not in _FREE}
        lora = train.pop("lora")
        del train["adapter"]
        split = self.data.splits.get(self.train.split)
        # By content: a stage before that was trained again makes this one another run.
        start = {"train.adapter": adapter_digest(self.train.adapter)} if self.train.adapter is not None else {}
        return {
            "model": self.model.name_or_path,
            "revision": self.model.revision,
            "from_cache": self.from_cache,
            "data.train": split.path if split is not None else None,
            "data.train.hub_split": split.hub_split if split is not None else None,
            **{f"data.{k}": getattr(self.data, k) for k in _DATA},
            **{f"cache.{k}": getattr(self.cache, k) for k in _CACHE},
            # Named where it is not the only one there was before, so that runs of then go on.
            **({} if self.cache.image_processor_device == "cpu" else {"cache.image_processor_device": "cuda"}),
            "cache.storage_dtype": self._storage_dtype(),
            **{f"train.{k}": v for k, v in train.items()},
            **start,
            **{f"train.lora.{k}": v for k, v in lora.items()},
        }

    def _storage_dtype(self) -> str | None:
        """None where training gets the tower's own numbers: the live path does whatever the cache would hold."""
        quantized = self.from_cache and self.cache.storage_dtype != "same"
        return self.cache.storage_dtype if quantized else None

    def length(self) -> dict[str, float]:
        """How long the run is to be; a longer one goes on from the last checkpoint."""
        return {"num_train_epochs": self.train.num_train_epochs, "max_steps": self.train.max_steps}


def is_finished(job: Job) -> bool:
    """Whether the run folder holds the finished run of this job."""
    run = read_run(job.output_dir)
    return (
        run.get("finished") == job.length()
        and run.get("settings") == job.settings()
        and (job.output_dir / ADAPTER / WEIGHTS_FILE).is_file()
    )
