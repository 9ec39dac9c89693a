"""One training run, from sections of the configuration to the saved adapter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cache.atomic import write_text
from cache.bad_records import list_rejected
from cache.checkpoint import load_hf_config
from cache.config import CacheConfig, DataConfig, ModelConfig
from cache.errors import ConfigError, StoppedError
from cache.fingerprint import expected_fingerprint
from cache.preprocess import ImageProcessor
from cache.progress import Progress, Silent
from cache.reader import FeatureCache, find_cache
from cache.records import Record
from cache.vision_tower import VisionTower
from train.chat import ChatEncoder
from train.config import EvalConfig, TrainConfig
from train.dataset import KnownImages, SampleBuilder, Samples
from train.evaluate import Evaluation, Evaluator, weighted_loss
from train.features import CachedSource, FeatureSource, LiveSource
from train.lora import add_lora, load_adapter
from train.model import autocast, load_language_model, prepare_for_training, training_device, uses_flex
from train.run_folder import ADAPTER, CONFIG_FILE, open_run, read_run, save_folder, write_run
from train.step import StepDataset

if TYPE_CHECKING:
    from train.trainer import StepTrainer

logger = logging.getLogger("train")

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the data side of a run needs: tokens, images, and where features come from."""

    image_token_id: int
    processor: ImageProcessor
    samples: SampleBuilder
    cache: FeatureCache | None
    source: FeatureSource
    max_image_pixels: int

    @classmethod
    def open(cls, job: Job) -> Inputs:
        """Open tokenizer, image processor and cache.

        Raises:
            ConfigError: the checkpoint lacks something.
            CacheError: there is no cache for this configuration.
        """
        image_token_id = int(load_hf_config(job.model).image_token_id)
        processor = ImageProcessor.from_checkpoint(job.model, job.cache)
        encoder = ChatEncoder.from_checkpoint(job.model, image_token_id)
        cache, limit = None, job.cache.max_image_pixels
        source: FeatureSource = LiveSource(processor, limit)
        if job.from_cache:
            cache = find_cache(
                job.cache_dir,
                expected_fingerprint(job.model, job.cache),
                any_backend=job.cache.image_processor_backend == "auto",
                verify_checksums=job.cache.verify_checksums,
            )
            source = CachedSource(cache)
        builder = SampleBuilder(encoder, processor.merge_size, job.data)
        return cls(image_token_id, processor, builder, cache, source, limit)

    def known(self, split: str, progress: Progress) -> Callable[[Sequence[Record]], KnownImages]:
        """Where keys and grids of a split's images come from: the cache, or the files' headers."""
        cache = self.cache
        if cache is not None:
            return lambda _: KnownImages.of(cache.split(split))
        return lambda records: KnownImages.scan(records, self.processor, self.max_image_pixels, progress)

    def steps(
        self, samples: Samples, config: TrainConfig, *, shuffle: bool, rank: int = 0, world_size: int = 1
    ) -> StepDataset:
        """The samples as optimizer steps."""
        return StepDataset(
            samples.samples,
            self.source,
            effective_batch_size=config.effective_batch_size,
            tokens_per_pack=config.tokens_per_pack,
            image_token_id=self.image_token_id,
            merge_size=self.processor.merge_size,
            seed=config.seed if shuffle else None,
            order=config.order,
            share_prefixes=config.share_prefixes,
            blocks=uses_flex(config, training_device(config)),
            rank=rank,
            world_size=world_size,
        )


def run_training(
    job: Job, progress: Progress, should_stop: Callable[[], bool] = lambda: False, *, resolved_config: str | None = None
) -> Path | None:
    """Train and save the adapter; go on from the last checkpoint when the run folder has one.

    Args:
        resolved_config: kept as config.yaml in the run folder.

    Returns:
        The adapter's folder; None in the other processes of a distributed run.

    Raises:
        PipelineError: see the parts.
        StoppedError: `should_stop` said so; a checkpoint was written.
    """
    from train.arguments import training_arguments

    evaluate = _has_eval_split(job)
    arguments = training_arguments(job.train, job.output_dir, evaluate=evaluate)
    checkpoint = open_run(job.output_dir, job.settings(), resume=job.train.resume)
    if resolved_config is not None and arguments.process_index == 0:
        write_text(job.output_dir / CONFIG_FILE, resolved_config)
    inputs = Inputs.open(job)
    samples = inputs.samples.training(job.train.split, inputs.known(job.train.split, progress), progress)
    share = {"rank": arguments.process_index, "world_size": arguments.world_size}
    train_steps = inputs.steps(samples, job.train, shuffle=True, **share)
    eval_steps = None
    if evaluate and job.train.eval_split is not None:
        held_out = inputs.samples.training(job.train.eval_split, inputs.known(job.train.eval_split, progress), progress)
        eval_steps = inputs.steps(held_out, job.train, shuffle=False, **share)
    if arguments.process_index == 0:
        _log_data(samples, train_steps)
        list_rejected(job.output_dir, job.train.split, samples.rejected)
    trainer = _make_trainer(job, inputs, arguments, train_steps, eval_steps, should_stop)
    if checkpoint is not None:
        logger.info("going on from %s", checkpoint)
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if any(getattr(callback, "stopped", False) for callback in trainer.callback_handler.callbacks):
        raise StoppedError(
            f"stopped after step {result.global_step}; a checkpoint is written", do="run the same command to go on"
        )
    if not trainer.is_world_process_zero():
        return None
    adapter = job.output_dir / ADAPTER
    save_folder(adapter, lambda folder: trainer.accelerator.unwrap_model(trainer.model).save_pretrained(str(folder)))
    write_run(job.output_dir, job.settings(), finished_steps=result.global_step)
    return adapter


def run_evaluation(job: Job, split: str, adapter: Path | None, progress: Progress) -> Evaluation:
    """Loss and generated answers on a split.

    Args:
        adapter: None for the bare model.
    """
    inputs = Inputs.open(job)
    known = inputs.known(split, progress)
    held_out = inputs.samples.training(split, known, progress)
    prompts = inputs.samples.prompts(split, known, progress)
    list_rejected(job.output_dir, split, held_out.rejected)
    device = training_device(job.train)
    model = load_adapter(load_language_model(job.model, job.train, device), adapter)
    tower = None if job.from_cache else load_tower(job, device)
    steps = inputs.steps(held_out, job.train, shuffle=False)
    batches = (steps[0, number] for number in range(len(steps)))
    totals = weighted_loss(model, batches, device, tower, lambda: autocast(job.train, device))
    evaluator = Evaluator(inputs.samples.encoder, inputs.source, inputs.processor.merge_size, job.eval, tower=tower)
    with autocast(job.train, device):
        result = evaluator.run(model, prompts, progress)
    return Evaluation({"loss": float(totals[0] / totals[1]), **result.scores}, result.predictions)


def describe(job: Job, progress: Progress) -> str:
    """What a run would do, without loading a model."""
    inputs = Inputs.open(job)
    samples = inputs.samples.training(job.train.split, inputs.known(job.train.split, progress), progress)
    steps = inputs.steps(samples, job.train, shuffle=True)
    tokens = sum(sample.num_tokens for sample in samples.samples)
    total = job.train.max_steps if job.train.max_steps > 0 else math.ceil(job.train.num_train_epochs * len(steps))
    return (
        f"{len(samples.samples)} samples, {len(samples.rejected)} records left out, {tokens} tokens, "
        f"{tokens / len(samples.samples):.0f} a sample, the longest {max(s.num_tokens for s in samples.samples)}\n"
        f"  {len(steps)} steps an epoch of {job.train.effective_batch_size} samples, {total} steps in all\n"
        f"  run folder  {job.output_dir}"
    )


def load_tower(job: Job, device: torch.device) -> VisionTower:
    """The vision tower for the live path, on the training device."""
    return VisionTower.load(job.model, job.cache.model_copy(update={"device": str(device)}))


def is_finished(job: Job) -> bool:
    """Whether the run folder holds the finished run of this job."""
    run = read_run(job.output_dir)
    return (
        run.get("finished_steps") is not None
        and run.get("settings") == job.settings()
        and (job.output_dir / ADAPTER / "adapter_model.safetensors").is_file()
    )


def _make_trainer(
    job: Job,
    inputs: Inputs,
    arguments: Any,
    train_steps: StepDataset,
    eval_steps: StepDataset | None,
    should_stop: Callable[[], bool],
) -> StepTrainer:
    from transformers import PrinterCallback

    from train.callbacks import LogLines, MetricsFile, StopWhenAsked
    from train.trainer import StepTrainer

    device = training_device(job.train)
    model = load_language_model(job.model, job.train, device)
    model = add_lora(model, job.train.lora, seed=job.train.seed)
    prepare_for_training(model, job.train, device)
    tower = None
    if not job.from_cache:
        tower = load_tower(job, device)
    trainer = StepTrainer(
        model,
        arguments,
        train_steps,
        eval_steps,
        tower=tower,
        generation_metrics=_generation_metrics(job, inputs, tower) if eval_steps is not None else None,
        callbacks=[MetricsFile(job.output_dir), LogLines(), StopWhenAsked(should_stop)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _generation_metrics(
    job: Job, inputs: Inputs, tower: VisionTower | None
) -> Callable[[Any], dict[str, float]] | None:
    if job.train.metric_for_best_model == "loss" or job.train.eval_split is None:
        return None
    split = job.train.eval_split
    prompts = inputs.samples.prompts(split, inputs.known(split, Silent()), Silent())
    evaluator = Evaluator(inputs.samples.encoder, inputs.source, inputs.processor.merge_size, job.eval, tower=tower)

    def scores(model: Any) -> dict[str, float]:
        with autocast(job.train, next(model.parameters()).device):
            return evaluator.run(model, prompts, Silent()).scores

    return scores


def _has_eval_split(job: Job) -> bool:
    split = job.train.eval_split
    if split is None or split in job.data.splits:
        return split is not None
    if "eval_split" in job.train.model_fields_set:
        raise ConfigError(
            f"train.eval_split is {split!r}, but data.splits names only {', '.join(job.data.splits)}",
            do="name one of them, or set train.eval_split: null",
        )
    return False


def _log_data(samples: Samples, steps: StepDataset) -> None:
    tokens = sum(sample.num_tokens for sample in samples.samples)
    images = {image.key for sample in samples.samples for image in sample.images}
    logger.info(
        "%d samples over %d images, %d tokens in all (%.0f a sample), %d steps an epoch, %d records left out",
        len(samples.samples),
        len(images),
        tokens,
        tokens / len(samples.samples),
        len(steps),
        len(samples.rejected),
    )
