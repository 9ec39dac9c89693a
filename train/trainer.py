"""A thin transformers.Trainer: one dataset item is one optimizer step, made of packs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from cache.errors import ResourceError
from cache.vision_tower import VisionTower
from train.evaluate import weighted_loss
from train.loss import pack_loss
from train.on_device import Feeder
from train.sharding import average_gradients
from train.shared_memory import require_room
from train.stage_losses import StageLosses
from train.step import Step
from train.step_dataset import StepDataset
from train.step_loader import OneAhead, StepLoader, make_loader
from train.throughput import Throughput

IN_HAND = 2  # steps that training holds itself, in the workers' memory unless they were copied to pinned memory


class StepTrainer(Trainer):
    """Runs steps that are already cut into packs.

    Gradients are those of sum(weight * loss) / sum(weight) over all samples of the step, whatever packs, processes or
    micro-batches it was split into.

    Args:
        model: PEFT model over the stock class.
        args: transformers' arguments; gradient_accumulation_steps must be 1, since packs do that.
        train_steps, eval_steps: the data.
        tower: for the live path only.
        generation_metrics: called at each evaluation, adds to its metrics.

    Raises:
        ResourceError: the node's shared memory does not hold what the workers prepare ahead.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        train_steps: StepDataset,
        eval_steps: StepDataset | None,
        *,
        tower: VisionTower | None = None,
        generation_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self._sharded = bool(getattr(model, "is_distributed_loading_by_transformers", False))
        saving = args.save_strategy
        if self._sharded:
            # Trainer refuses checkpoints of a divided model, whose optimizer would be in parts; here that is whole.
            args.save_strategy = SaveStrategy.NO
        super().__init__(
            model=model, args=args, train_dataset=train_steps, eval_dataset=eval_steps, callbacks=callbacks or []
        )
        self.args.save_strategy = saving
        self._require_shared_memory([train_steps, eval_steps])
        self._tower, self._feeder = tower, Feeder(self.args.device, tower)
        self._ahead = OneAhead()
        self._in_training = False  # to tell the model so takes milliseconds, for it has thousands of modules
        self._generation_metrics = generation_metrics
        self._throughput = Throughput(self.args.device)
        self._stage_losses = StageLosses(train_steps.stage_names, self.args.device)
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def get_train_dataloader(self) -> StepLoader:
        """The loader of steps; each process has a dataset that knows its share. Asked for once a training."""
        self._ahead, self._in_training = OneAhead(), False
        return self._loader(self.train_dataset)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> StepLoader:
        """See get_train_dataloader."""
        return self._loader(eval_dataset or self.eval_dataset)

    def _loader(self, dataset: Any) -> StepLoader:
        return make_loader(
            dataset,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor or 2,
            persistent_workers=self.args.dataloader_persistent_workers,
        )

    def _require_shared_memory(self, datasets: Sequence[StepDataset | None]) -> None:
        """Before any worker is started: later, what the others hold would be counted twice."""
        workers = self.args.dataloader_num_workers
        ahead = workers * (self.args.dataloader_prefetch_factor or 2)
        pinned = self.args.dataloader_pin_memory and torch.cuda.is_available()
        ahead += 0 if pinned else IN_HAND
        asked = [(min(ahead, len(one)), one.largest_step_bytes) for one in datasets if one is not None and workers]
        require_room(asked, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # torchrun's word for it

    def num_examples(self, dataloader: Any) -> int:
        """Samples in an epoch, for Trainer's own log."""
        return int(dataloader.dataset.num_samples)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: Any
    ) -> tuple[list[Any], None]:
        """Fetch the next step and note how long it kept the device waiting."""
        with self._throughput.waiting():
            step = self._ahead.take(epoch_iterator)
        return [] if step is None else [step], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over the packs of a step; gradients of all processes are reduced with the last one."""
        step: Step = inputs
        if not self._in_training:
            model.train()
            self._in_training = True
        torch.manual_seed(step_seed(self.args.seed, self.state.global_step, self.args.process_index))
        total = torch.zeros((), device=self.args.device)
        scale = self.accelerator.num_processes / step.total_weight
        try:
            for number, (pack, features) in enumerate(self._feeder.packs(step, self._ahead.following)):
                last = number == len(step.packs) - 1
                with contextlib.nullcontext() if last or self._sharded else self.accelerator.no_sync(model):
                    with self.compute_loss_context_manager():
                        losses = self._stage_losses.room(pack)
                        loss = pack_loss(model, pack, features, scale=scale, losses=losses)
                    self._stage_losses.add(pack, losses)
                    self.accelerator.backward(loss)
                total += loss.detach()
            if self._sharded:
                average_gradients(self._trainable)
        except torch.OutOfMemoryError as error:
            longest = max(pack.input_ids.shape[1] for pack in step.packs)
            raise out_of_memory(longest) from error
        self._throughput.count(step)
        return total

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Weighted mean loss over the evaluation split, and generation metrics where they were asked for."""
        del ignore_keys
        self._in_training = False
        self._feeder.forget()  # generating answers takes memory, too
        started = time.perf_counter()
        loader: Any = self.get_eval_dataloader(eval_dataset)
        stages = StageLosses(loader.dataset.stage_names, self.args.device)
        totals = weighted_loss(
            self.model, loader, self.args.device, self._tower, self.compute_loss_context_manager, stages
        )
        totals = self._summed(totals)
        metrics = {f"{metric_key_prefix}_loss": float(totals[0] / totals[1])}
        metrics |= {f"{metric_key_prefix}_{name}": value for name, value in stages.take(self._summed).items()}
        if self._generation_metrics is not None:
            scores = self._generation_metrics(self.model)
            metrics |= {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        seconds = time.perf_counter() - started
        metrics[f"{metric_key_prefix}_runtime"] = round(seconds, 3)
        metrics[f"{metric_key_prefix}_samples_per_second"] = round(loader.dataset.num_samples / seconds, 3)
        self._throughput.pause()
        self.log(dict(metrics))
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput and the losses of stages to the training lines."""
        if "loss" in logs and "grad_norm" in logs:
            logs |= self._stage_losses.take(self._summed)
            remaining = self.state.max_steps - self.state.global_step
            logs |= self._throughput.report(remaining)
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Time it: it is no part of the rate of steps."""
        started = time.perf_counter()
        super()._save_checkpoint(model, trial)
        seconds = time.perf_counter() - started
        self._throughput.leave_out(seconds)
        self.log({"save_runtime": round(seconds, 3)})

    def _summed(self, totals: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        summed: torch.Tensor = self.accelerator.reduce(totals, reduction="sum")
        return summed

    def _set_signature_columns_if_needed(self) -> None:
        # A step is no dict of columns.
        self._signature_columns: list[str] = []

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as PEFT does. Asked for the model's whole state, PEFT would gather a divided base."""
        model = self.accelerator.unwrap_model(self.model)
        model.save_pretrained(str(folder), state_dict=_trainable_state(model))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, _trainable_state(self.model) if state_dict is None else state_dict)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """Nothing: the adapter is the same everywhere from the start, and training_step averages its gradients once."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not estimated: transformers' formula assumes one unpacked batch."""
        return 0


def _trainable_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def step_seed(seed: int, step: int, process: int) -> int:
    """Seed of what is random in a process's share of a step (dropout), so that resuming needs no generator's state."""
    return int(np.random.SeedSequence((seed, step, process)).generate_state(1, np.uint64)[0])


def out_of_memory(tokens: int) -> ResourceError:
    """The error for a step that does not fit."""
    return ResourceError(
        f"the GPU's memory does not suffice for a pack of {tokens} tokens",
        do="lower train.tokens_per_pack (the result stays the same), or set train.gradient_checkpointing: true, "
        "or train.quantization: nf4; if one sample alone is too long, lower cache.max_pixels",
    )
