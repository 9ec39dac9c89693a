"""One training run, from sections of the configuration to the saved adapter."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cache.atomic import write_text
from cache.bad_records import list_rejected
from cache.content import rows_digest
from cache.errors import StoppedError
from cache.progress import Progress, Silent
from cache.vision_tower import VisionTower
from train.adapter import require_adapter
from train.attention import what_auto_is
from train.best_metric import needs_answers, require_given
from train.config import TrainConfig
from train.dataset import Samples
from train.evaluate import Evaluator
from train.held_out import HeldOut, has_eval_split
from train.inputs import Inputs, load_tower
from train.job import Job
from train.lora import add_lora, continue_lora
from train.model import autocast, load_language_model, prepare_for_training, training_device
from train.recompute import recomputing
from train.rows import with_rows_that_fit
from train.run_folder import ADAPTER, CONFIG_FILE, open_run, save_folder, write_run
from train.sharding import is_sharded
from train.step_dataset import StepDataset
from train.stopping import AskedOfAny, leave_processes, stopped_before_training

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from train.trainer import StepTrainer

logger = logging.getLogger("train")


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
        StoppedError: `should_stop` said so; unless that was before the first step, a checkpoint was written.
    """
    try:
        adapter = _run(job, progress, should_stop, resolved_config)
    except StoppedError:
        leave_processes()
        raise
    leave_processes()
    return adapter


def _run(job: Job, progress: Progress, should_stop: Callable[[], bool], resolved_config: str | None) -> Path | None:
    from train.arguments import training_arguments
    from train.callbacks import StopWhenAsked

    evaluate = has_eval_split(job)
    if job.train.adapter is not None:
        require_adapter(job.train.adapter, "train the stage before first, or set train.adapter to an adapter's folder")
    arguments = training_arguments(job.train, job.output_dir, evaluate=evaluate)
    asked = AskedOfAny(should_stop)
    rows = rows_digest(job.data, job.train.split)
    checkpoint = open_run(job.output_dir, job.settings(), rows, resume=job.train.resume)
    if resolved_config is not None and arguments.process_index == 0:
        write_text(job.output_dir / CONFIG_FILE, resolved_config)
    data = asked.prepare(lambda stoppable: _read(job, arguments, stoppable, evaluate=evaluate), progress)
    trainer = _make_trainer(job, data, rows, arguments, StopWhenAsked(asked))
    if asked():
        raise stopped_before_training()
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
    save_folder(adapter, trainer.save_adapter)
    write_run(job.output_dir, job.settings(), rows, finished=job.length())
    return adapter


@dataclass(frozen=True, slots=True)
class _Data:
    """What a run reads: its samples, and those that it is evaluated on, if any."""

    inputs: Inputs
    samples: Samples
    held_out: HeldOut | None


def _read(job: Job, arguments: Any, progress: Progress, *, evaluate: bool) -> _Data:
    held_out_split = job.train.eval_split if evaluate else None
    splits = [job.train.split, *([held_out_split] if held_out_split is not None else [])]
    inputs = Inputs.open(job)
    inputs = inputs.staged(job, splits, progress, local_rank=arguments.local_process_index)
    samples = inputs.samples.training(job.train.split, inputs.known(job.train.split, progress), progress)
    _log_data(job, arguments, job.train.split, samples)
    if held_out_split is None:
        return _Data(inputs, samples, None)
    metric = job.train.metric_for_best_model
    held_out = HeldOut.read(inputs, held_out_split, progress, answers=needs_answers(metric), limit=job.eval.limit)
    _log_data(job, arguments, held_out_split, held_out.measured)
    require_given(metric, held_out_split, held_out.measured.records)
    return _Data(inputs, samples, held_out)


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


def _make_model(job: Job, device: torch.device) -> Any:
    model = load_language_model(job.model, job.train, device)
    if job.train.adapter is None:
        model = add_lora(model, job.train.lora, seed=job.train.seed)
    else:
        model = continue_lora(model, job.train.lora, job.train.adapter, seed=job.train.seed)
    prepare_for_training(model, job.train, device)
    return model


def _make_trainer(job: Job, data: _Data, rows: str, arguments: Any, stop: TrainerCallback) -> StepTrainer:
    from transformers import PrinterCallback

    from train.arguments import training_arguments
    from train.callbacks import LogLines, MetricsFile
    from train.trainer import StepTrainer

    device = training_device(job.train)
    if job.train.attention == "auto" and not arguments.process_index:
        logger.info("train.attention: auto is %s", what_auto_is(job.train, device))
    model = _make_model(job, device)
    tower = None if job.from_cache else load_tower(job, device)
    share = {"rank": arguments.process_index, "world_size": arguments.world_size}

    def steps(config: TrainConfig) -> StepDataset:
        return data.inputs.steps(data.samples, config, shuffle=True, **share)

    config = with_rows_that_fit(
        job.train,
        model,
        steps,
        job.output_dir,
        {**job.settings(), "rows": rows},  # longer ones may not fit what was chosen for others
        device=device,
        tower=tower,
        world_size=arguments.world_size,
    )
    recomputing(model, config.gradient_checkpointing or False)
    held_out = data.held_out
    trainer = StepTrainer(
        model,
        training_arguments(config, job.output_dir, evaluate=held_out is not None),
        steps(config),
        None if held_out is None else data.inputs.steps(held_out.measured, config, shuffle=False, **share),
        tower=tower,
        generation_metrics=None if held_out is None else _generation_metrics(job, data.inputs, held_out, tower, share),
        callbacks=[MetricsFile(job.output_dir), LogLines(), stop],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _generation_metrics(
    job: Job, inputs: Inputs, held_out: HeldOut, tower: VisionTower | None, share: dict[str, int]
) -> Callable[[Any], dict[str, float]] | None:
    if not needs_answers(job.train.metric_for_best_model):
        return None
    if is_sharded(job.train):
        share = {}  # the processes go through a divided base together, so each answers all
    evaluator = Evaluator(inputs.samples.encoder, inputs.source, inputs.processor.merge_size, job.eval, tower=tower)

    def scores(model: Any) -> dict[str, float]:
        with autocast(job.train, next(model.parameters()).device):
            return evaluator.run(model, held_out.prompts, Silent(), **share).scores

    return scores


def _log_data(job: Job, arguments: Any, split: str, samples: Samples) -> None:
    """Say what a split holds, and list what was left out of it; one process does."""
    if arguments.process_index:
        return
    tokens = sum(sample.num_tokens for sample in samples.samples)
    logger.info(
        "%s: %d samples over %d images, %d tokens in all (%.0f a sample), %d records left out",
        split,
        len(samples.samples),
        len({image.key for sample in samples.samples for image in sample.images}),
        tokens,
        tokens / len(samples.samples),
        len(samples.rejected),
    )
    list_rejected(job.output_dir, split, samples.rejected)
