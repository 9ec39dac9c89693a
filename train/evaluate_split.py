"""One evaluation, from sections of the configuration to scores and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cache.bad_records import list_rejected
from cache.progress import Progress
from train.adapter import NO_ADAPTER
from train.adapter_settings import require_usable
from train.evaluate import Evaluation, Evaluator, weighted_loss
from train.held_out import HeldOut
from train.inputs import Inputs, load_tower
from train.job import Job
from train.lora import load_adapter
from train.model import autocast, load_language_model, training_device
from train.stage_losses import StageLosses
from train.step import Step
from train.step_dataset import StepDataset


def run_evaluation(job: Job, split: str, adapter: Path | None, progress: Progress) -> Evaluation:
    """Loss and generated answers on a split.

    Args:
        adapter: None for the bare model.

    Raises:
        ConfigError: there is no such adapter, or it does not work on this model.
    """
    if adapter is not None:
        require_usable(adapter, job.train.quantization, NO_ADAPTER)
    inputs = Inputs.open(job).staged(job, [split], progress, local_rank=0)
    held_out = HeldOut.read(inputs, split, progress, answers=True, limit=job.eval.limit)
    list_rejected(job.output_dir, split, held_out.measured.rejected)
    device = training_device(job.train)
    model = load_adapter(load_language_model(job.model, job.train, device), adapter)
    tower = None if job.from_cache else load_tower(job, device)
    steps = inputs.steps(held_out.measured, job.train, shuffle=False)
    stages = StageLosses(steps.stage_names, device)
    batches = _reported(steps, progress)
    totals = weighted_loss(model, batches, device, tower, lambda: autocast(job.train, device), stages)
    evaluator = Evaluator(inputs.samples.encoder, inputs.source, inputs.processor.merge_size, job.eval, tower=tower)
    with autocast(job.train, device):
        result = evaluator.run(model, held_out.prompts, progress)
    return Evaluation({"loss": float(totals[0] / totals[1]), **stages.take(), **result.scores}, result.predictions)


def _reported(steps: StepDataset, progress: Progress) -> Iterator[Step]:
    progress.start("computing the loss", steps.num_samples, "sample")
    for number in range(len(steps)):
        step = steps[0, number]
        yield step
        progress.advance(step.num_samples)
    progress.finish()
