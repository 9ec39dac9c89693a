"""Settings and folders that cannot work, checkpoints and adapters that cannot be used: exit code 2."""

from __future__ import annotations

import ast
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROW = {"image": "good0.png", "question": "Which colours?", "answer": "Red and blue."}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.lora.r=0", ("train.lora.r: must be greater than 0",)),
        ("train.lora.rank=8", ("train.lora.rank: there is no such setting; nearest: train.lora.r",)),
        ("train.lora.target_modules=[qkv]", ("'qkv' lies in the vision tower", "choose from ", "q_proj")),
        ("train.lora.target_modules=[visual.blocks.0.mlp.linear_fc1]", ("lies in the vision tower",)),
        ("train.lora.target_modules=[q_prj]", ("'q_prj' matches no linear layer", "q_proj")),
        ("train.lora.target_modules=[]", ("train.lora.target_modules",)),
        ("train.lr_scheduler_type=cosin", ("train.lr_scheduler_type: must be", "cosine")),
        ("train.optim=adamm", ("adamm is not a valid OptimizerNames",)),
        ("train.report_to=[wandb]", ("wandb",)),
        ("train.report_to=[none, tensorboard]", ("train.report_to: none stands alone",)),
        ("train.optim=galore_adamw", ("galore_torch", "install it")),
        ("train.seed=-1", ("train.seed: must be at least 0",)),
        ("train.device=cuda", ("train.device: must be 'auto' or 'cpu'",)),
        ("model=/no/such/checkpoint", ("/no/such/checkpoint",)),
        ("output_dir=/dev/null/run", ("/dev/null",)),
    ],
)
def test_a_setting_that_cannot_work(
    run: Callable[..., Any], cached: Path, override: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    features = f"cache.dir={tmp_path / 'run' / 'features'}"

    result = run("train", "--config", cached, "--from-cache", "--set", features, "--set", override)

    result.check_refusal(2, *parts)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.device=cuda:7", "device 'cuda:7' is not there"),
        ("cache.device=gpu", "device 'gpu' is not one that torch knows"),
        ("cache.attn_implementation=flash_attention_2", "flash_attention_2"),
        ("cache.image_processor_backend=torchvision", "torchvision is not installed"),
        ("cache.max_pixels=1", "min_pixels"),
        ("cache.dir=/dev/null/features", "/dev/null"),
    ],
)
def test_a_cache_setting_that_cannot_work(
    run: Callable[..., Any], config: Callable[..., Path], override: str, message: str
) -> None:
    run("cache", "--config", config(ROW), "--split", "train", "--set", override).check_refusal(2, message)


def test_a_folder_that_may_not_be_written(
    run: Callable[..., Any], cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_args: Any, **_kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "runs/first")

    monkeypatch.setattr("train.run.open_run", forbidden)

    run("train", "--config", cached, "--from-cache").check_refusal(2, "runs/first: Permission denied", "output_dir")


def test_a_run_folder_that_is_a_file(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    features = f"cache.dir={tmp_path / 'run' / 'features'}"

    result = run(
        "train", "--config", cached, "--from-cache", "--set", features, "--set", f"output_dir={tmp_path}/taken"
    )

    result.check_refusal(2, "taken")


def test_every_error_says_what_to_do() -> None:
    root = Path(__file__).parents[2]
    silent = []
    for file in sorted(path for package in ("cache", "pipeline", "train") for path in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"ConfigError", "DataError", "CacheError", "ResourceError"}
                and not any(keyword.arg == "do" for keyword in node.keywords)
            ):
                silent.append(f"{file.relative_to(root)}:{node.lineno}")

    assert silent == []


BROKEN_CHECKPOINTS = {
    "truncated weights": ("model.safetensors", b"x" * 999, "Error while deserializing header"),
    "empty weights": ("model.safetensors", b"", "Error while deserializing header"),
    "no weights": ("model.safetensors", None, "model.safetensors"),
    "malformed config": ("config.json", b"{", "not a valid JSON file"),
    "no config": ("config.json", None, "cannot load the model's config"),
    "another kind of model": ("config.json", b'{"model_type": "bert"}', "a bert model has no vision tower"),
    "no processor": ("preprocessor_config.json", None, "no image processor can be loaded"),
    "malformed processor": ("preprocessor_config.json", b"[]", "no image processor can be loaded"),
    "malformed tokenizer": ("tokenizer.json", b"{", "cannot load the tokenizer"),
    "no tokenizer": ("tokenizer.json", None, "the tokenizer does not know the image token"),
    "no template": ("chat_template.jinja", None, "has no chat template"),
}


@pytest.mark.parametrize("name", BROKEN_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used(
    run: Callable[..., Any], cached: Path, tiny: Path, tmp_path: Path, name: str
) -> None:
    file, content, reason = BROKEN_CHECKPOINTS[name]
    broken = shutil.copytree(tiny, tmp_path / "broken")
    (broken / file).unlink()
    if content is not None:
        (broken / file).write_bytes(content)
    model = f"model={broken}"

    run("train", "--config", cached, "--set", model).check_refusal(2, "broken", reason)
    run("predict", "--config", cached, "--prompt", "Hi", "--base", "--set", model).check_refusal(2, "broken")


def test_a_checkpoint_that_lacks_a_tensor(run: Callable[..., Any], cached: Path, tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if "language_model.layers.0" in name)
    tensors.pop(name)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})

    for verb in (["train", "--from-cache"], ["predict", "--prompt", "Hi", "--base"]):
        result = run(verb[0], "--config", cached, *verb[1:], "--set", f"model={broken}")
        result.check_refusal(2, "the checkpoint lacks 1 tensors", name)


def test_an_adapter_of_another_model(run: Callable[..., Any], cached: Path, tiny_moe: Path, tmp_path: Path) -> None:
    assert run("train", "--config", cached, "--from-cache").code == 0

    result = run("predict", "--config", cached, "--prompt", "Hi", "--set", f"model={tiny_moe}")

    result.check_refusal(2, "run/adapter: the adapter does not fit the model", "tensors have no place there")


def test_a_damaged_adapter(run: Callable[..., Any], cached: Path, tmp_path: Path) -> None:
    assert run("train", "--config", cached, "--from-cache").code == 0
    adapter = tmp_path / "run" / "adapter"
    (adapter / "adapter_model.safetensors").write_bytes(b"abc")

    run("eval", "--config", cached, "--split", "train").check_refusal(2, "run/adapter: the adapter does not fit")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "adapter_model.safetensors", "trainer_state.json"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_checkpoint_that_was_cut_off_is_passed_over(
    run: Callable[..., Any], cached: Path, tmp_path: Path, name: str, share: float
) -> None:
    steps = ["--set", "train.max_steps=2", "--set", "train.save_steps=1"]
    assert run("train", "--config", cached, "--from-cache", *steps).code == 0
    shutil.rmtree(tmp_path / "run" / "adapter")
    file = tmp_path / "run" / "checkpoint-2" / name
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])

    again = run("train", "--config", cached, "--from-cache", *steps)

    assert again.code == 0, again.err
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
