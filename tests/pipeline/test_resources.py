"""Memory and disk that run out, errors of libraries, signals: the exit code, the setting to lower, nothing lost."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.exit import stop_request

ROW = {"image": "good0.png", "question": "Which colours?", "answer": "Red and blue."}


def out_of_memory(*_args: Any, **_kwargs: Any) -> None:
    """What the device says."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has ...")


def test_out_of_memory_names_the_setting_to_lower(
    run: Callable[..., Any], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel.forward", out_of_memory)

    trained = run("train", "--config", cached, "--from-cache")
    evaluated = run("eval", "--config", cached, "--split", "train", "--base")

    trained.check_refusal(5, "lower train.tokens_per_pack", "train.gradient_checkpointing: true")
    evaluated.check_refusal(5, "CUDA out of memory", "eval.batch_size")


def test_out_of_memory_in_the_tower_keeps_what_is_committed(
    run: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    file = config(ROW, {**ROW, "image": "good1.png"}, {**ROW, "image": "good2.png"})
    stock, calls = Qwen3VLVisionModel.forward, iter(range(100))
    with monkeypatch.context() as patch:
        patch.setattr(
            Qwen3VLVisionModel, "forward", lambda *a, **k: stock(*a, **k) if next(calls) < 2 else out_of_memory()
        )
        run("cache", "--config", file, "--split", "train").check_refusal(5, "lower cache.max_pixels")

    again = run("cache", "--config", file, "--split", "train")
    assert "encoded now      1 images" in again.out


def test_a_disk_that_fills_up_while_caching(
    run: Callable[..., Any], cached: Path, add_record: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_record("new.png")

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cache.formats.base.OutputFile.append_tensor", full)
        run("cache", "--config", cached, "--split", "train").check_refusal(5, "is full", "free some space", "shards")

    again = run("cache", "--config", cached, "--split", "train")
    assert "encoded now      1 images" in again.out


def test_a_disk_too_small_is_told_before_anything_is_spent(
    run: Callable[..., Any], config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cache.plan.free_bytes", lambda _folder: 1000)

    result = run("cache", "--config", config(ROW), "--split", "train")

    result.check_refusal(5, "GB are needed", "free some space")
    # But for the note of what was hashed, so that it need not be hashed again, and the manifest that says whose it is.
    left = [file.relative_to(tmp_path / "run" / "features") for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert sorted("/".join(file.parts[1:]) for file in left) == ["manifest.json", "scans/train.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "checkpoint-1/optimizer.pt"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 764544 vs 764436"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
)
def test_a_disk_that_fills_up_while_training(
    run: Callable[..., Any], cached: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, tmp_path: Path
) -> None:
    def full(*_args: Any, **_kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("train.trainer.StepTrainer._save_checkpoint", full)
        run("train", "--config", cached, "--from-cache").check_refusal(5, "full", "free some space")

    assert not (tmp_path / "run" / "adapter").exists()
    assert run("train", "--config", cached, "--from-cache").code == 0


def test_a_bug_is_called_a_bug_and_shows_its_traceback(
    run: Callable[..., Any], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.inputs.Inputs.open", lambda _job: {}["missing"])

    result = run("train", "--config", cached, "--from-cache")

    assert result.code == 1
    assert "KeyError: 'missing'" in result.err
    assert "This is a bug in the program" in result.err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped at once; what was committed is kept"),
        (EOFError("Ran out of input"), 1, "This is a bug in the program"),
        (MemoryError(), 5, "cache.shard_size"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), 5, "num_workers"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), 5, "lower "),
        (OSError(errno.EROFS, "Read-only file system", "/data/run"), 2, "/data/run: Read-only file system"),
        (ValueError("of another library"), 1, "This is a bug in the program"),
    ],
)
def test_errors_of_libraries(
    run: Callable[..., Any],
    cached: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("train.inputs.Inputs.open", fail)

    result = run("train", "--config", cached, "--from-cache")

    assert (result.code, message in result.err) == (code, True), result.err


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")]
)
def test_a_signal_decides_the_exit_code(
    run: Callable[..., Any], cached: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def interrupted(*_args: Any, **_kwargs: Any) -> None:
        stop_request.received = signal.SIGTERM
        raise error

    monkeypatch.setattr("train.inputs.Inputs.open", interrupted)

    result = run("train", "--config", cached, "--from-cache")

    assert (result.code, "Traceback" in result.err) == (143, False), result.err
