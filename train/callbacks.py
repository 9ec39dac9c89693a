"""What watches training: the metrics file, the log lines, the request to stop."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cache.atomic import write_text
from train.run_folder import METRICS_FILE
from train.throughput import ALLOC_RETRIES

logger = logging.getLogger("train")

TELLING = 5  # so many log lines with retries


class MetricsFile(TrainerCallback):
    """Appends every log to metrics.jsonl, one object a line."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS_FILE

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget lines of steps that a resumed run will do again."""
        if state.is_world_process_zero and self._file.exists():
            lines = self._file.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step(line) <= state.global_step]
            write_text(self._file, "".join(f"{line}\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero and logs:
            with self._file.open("a", encoding="utf-8") as file:
                line = {"step": state.global_step, "max_steps": state.max_steps, **logs}
                file.write(json.dumps(line) + "\n")


class LogLines(TrainerCallback):
    """One readable line a log; a terminal and a SLURM log file can both live with it."""

    def __init__(self) -> None:
        self._lines_with_retries = 0

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Log one line."""
        if not state.is_world_process_zero or not logs:
            return
        if "samples_per_second" in logs:
            logger.info(_training_line(state, logs))
            self._tell_of_retries(logs)
        elif any(name.startswith("eval_") for name in logs):
            scores = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if name.startswith("eval_"))
            logger.info("step %d/%d  %s", state.global_step, state.max_steps, scores)

    def _tell_of_retries(self, logs: dict[str, float]) -> None:
        """Once, and not of the first steps, in which memory finds its form."""
        self._lines_with_retries += ALLOC_RETRIES in logs
        if self._lines_with_retries == TELLING and ALLOC_RETRIES in logs:
            logger.warning(
                "the GPU's memory is as good as full: in %d log lines so far torch had to give memory back and ask for "
                "it anew, for which the GPU waits; lower train.tokens_per_pack, or set "
                "train.gradient_checkpointing: true",
                TELLING,
            )


class StopWhenAsked(TrainerCallback):
    """Writes a checkpoint and stops when asked to; the next start goes on from there.

    Args:
        should_stop: asked once a step; must give the same answer in all processes (see stopping.AskedOfAny).
    """

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self.stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask Trainer for a checkpoint and for the end."""
        if self._should_stop():
            control.should_save = control.should_training_stop = self.stopped = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Trainer calls a stop within an epoch its end, too: evaluating would cost the time that is running out."""
        if self.stopped and state.epoch is not None and not float(state.epoch).is_integer():
            control.should_evaluate = control.should_save = False
        return control


def _training_line(state: TrainerState, logs: dict[str, float]) -> str:
    return (
        f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  lr {logs['learning_rate']:.2e}  "
        f"grad_norm {logs['grad_norm']:.2f}  {logs['samples_per_second']:.2f} samples/s  "
        f"{logs['image_tokens_per_second']:.0f} image tokens/s  data wait {logs['data_wait_share']:.1%}  "
        f"peak {logs['peak_memory_gib']:.2f} GiB{_time_left(logs)}"
    )


def _time_left(logs: dict[str, float]) -> str:
    if "seconds_left" not in logs:
        return ""
    left = int(logs["seconds_left"])
    return f"  left {left // 3600}:{left % 3600 // 60:02d}:{left % 60:02d}"


def _step(line: str) -> float:
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError):
        return float("inf")  # a line cut off by a kill
