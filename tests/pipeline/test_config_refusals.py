"""What a configuration must not hold: refused with key, value and the nearest settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cache.errors import ConfigError
from pipeline.config_file import load_config

from .conftest import MINIMAL


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trian", "train"),
        ("train.learning_rat", "train.learning_rate"),
        ("train.lr", "train.learning_rate"),
        ("train.per_device_train_batch_size", "train.effective_batch_size"),
        ("train.max_pixels", "cache.max_pixels"),
        ("train.lora.rank", "train.lora.r"),
        ("train.lora.alpha", "train.lora.lora_alpha"),
        ("train.lora.target_module", "train.lora.target_modules"),
        ("train.r", "train.lora.r"),
        ("data.split", "data.splits"),
        ("data.splits.train.imageroot", "data.splits.train.image_root"),
        ("model.nam_or_path", "model.name_or_path"),
        ("cache.maxpixels", "cache.max_pixels"),
        ("eval.max_tokens", "eval.max_new_tokens"),
        ("slurm.gres", "slurm.cache.gpus, slurm.train.gpus, slurm.eval.gpus, slurm.light.gpus"),
        ("slurm.queue", "slurm.partition"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(
    refusal: Callable[..., str], key: str, nearest: str
) -> None:
    message = refusal(MINIMAL, f"{key}=1")

    assert f"{key}: there is no such setting; nearest: {nearest}" in message
    assert "(from --set)" in message


def test_an_unknown_key_like_no_other_is_refused_with_those_of_its_section_if_they_are_few(
    refusal: Callable[..., str],
) -> None:
    few = refusal(MINIMAL + "eval: {zzz: 1}\n")
    many = refusal(MINIMAL + "slurm: {zzz: 1}\n")

    assert "eval.zzz: there is no such setting; there are: eval.batch_size, eval.limit" in few
    assert "--set" not in few
    assert "slurm.zzz: there is no such setting, and none of slurm is like it\n" in many
    assert "slurm.partition" not in many


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lora.r=0", "train.lora.r: must be greater than 0 (it is 0, from --set)"),
        ("train.lora.r=-4", "train.lora.r: must be greater than 0 (it is -4, from --set)"),
        ("train.lora.r=1.5", "train.lora.r: must be a whole number (it is 1.5, from --set)"),
        ("train.lora.lora_dropout=1", "train.lora.lora_dropout: must be less than 1 (it is 1, from --set)"),
        ("train.learning_rate=-1e-4", "train.learning_rate: must be greater than 0 (it is '-1e-4', from --set)"),
        ("train.learning_rate=.inf", "train.learning_rate: must be a finite number (it is inf, from --set)"),
        ("train.learning_rate=.nan", "train.learning_rate: must be a finite number (it is nan, from --set)"),
        ("train.weight_decay=-0.1", "train.weight_decay: must be at least 0 (it is -0.1, from --set)"),
        ("train.max_steps=0", "train.max_steps: must be positive, or -1 to go by num_train_epochs (it is 0"),
        ("train.tf32=maybe", "train.tf32: must be true or false (it is 'maybe', from --set)"),
        ("train.precision=bf32", "train.precision: must be 'bf16', 'fp16' or 'fp32' (it is 'bf32', from --set)"),
        ("train.report_to=none", "train.report_to: must be a list, such as [a, b] (it is 'none', from --set)"),
        ("train.report_to=[mlflow]", "train.report_to: must be 'tensorboard', 'wandb' or 'none' (it is 'mlflow'"),
        ("train.lora=8", "train.lora: must be a section (keys and values) (it is 8, from --set)"),
        ("train.lora.target_modules=5", "train.lora.target_modules: must be 'all-linear', or must be a list"),
        ("train=fast", "train: must be a section (keys and values) (it is 'fast', from --set)"),
        ("cache.dtype=fp32", "cache.dtype: must be 'bfloat16', 'float16' or 'float32' (it is 'fp32', from --set)"),
        ("cache.max_pixels=0", "cache.max_pixels: must be greater than 0 (it is 0, from --set)"),
        ("cache.max_pixels=1e6", "cache.max_pixels: must be a whole number, written in digits (it is '1e6'"),
        ("cache={min_pixels: 9, max_pixels: 4}", "cache: min_pixels 9 is larger than max_pixels 4 (from --set)"),
        ("train={load_best_model_at_end: true, eval_steps: 3, save_steps: 5}", "(5) to be a multiple of eval_steps (3"),
        ("train={load_best_model_at_end: true, eval_split: null}", "train: load_best_model_at_end needs an eval_split"),
        ("data.splits={}", "data.splits: names no split; give at least `train: PATH`"),
        ("data.splits={../up: a.jsonl}", "data.splits: split name '../up' may hold letters, digits, - and _ only"),
        ("data.splits.train=5", "data.splits.train: must be a section (keys and values) (it is 5, from --set)"),
        ("data.splits.train.path=", "data.splits.train.path: must be a text"),
        ("data.max_bad_share=1.5", "data.max_bad_share: must be at most 1 (it is 1.5, from --set)"),
        ("data.on_bad_record=skip", "data.on_bad_record: must be 'fail' or 'report' (it is 'skip', from --set)"),
        ("data.stage_format=plain", "data.stage_format: must contain {target} (it is 'plain', from --set)"),
        ("output_dir=5", "output_dir: must be a path (it is 5, from --set)"),
        ("output_dir=null", "output_dir: must be given (from --set)"),
    ],
)
def test_an_impossible_value_is_refused_once_with_key_and_value(
    refusal: Callable[..., str], override: str, message: str
) -> None:
    refused = refusal(MINIMAL, override)

    assert message in refused
    assert len(refused.splitlines()) == 2


@pytest.mark.parametrize("override", ["x", "=3", "train..r=3", ".r=3", "train.=3", ""])
def test_an_override_that_is_none_is_refused(refusal: Callable[..., str], override: str) -> None:
    assert f"--set {override!r} is not of the form section.key=value" in refusal(MINIMAL, override)


def test_an_override_below_a_value_is_refused(refusal: Callable[..., str]) -> None:
    message = refusal(MINIMAL + "train: {seed: 3}\n", "train.seed.deep=1")

    assert "--set 'train.seed.deep=1': train.seed is a value, not a section" in message


def test_an_override_that_is_not_yaml_is_refused_in_one_line(refusal: Callable[..., str]) -> None:
    message = refusal(MINIMAL, "train.report_to=[none")

    assert "--set 'train.report_to=[none': the value is not YAML: " in message
    assert len(message.splitlines()) == 2


def test_an_override_that_yaml_would_read_otherwise_has_to_be_quoted(refusal: Callable[..., str]) -> None:
    assert "the value is not YAML" in refusal(MINIMAL, "data.stage_format={name}: {target}")
    assert "must be a text; put it in quotes" in refusal(MINIMAL, "data.stage_format={target}")


def test_all_mistakes_are_told_at_once(refusal: Callable[..., str]) -> None:
    message = refusal("modle: x\ndata: {splits: {train: a}}\ntrain: {lora: {r: 0}}\n")

    assert "\n  output_dir: must be given" in message
    assert "model: must be given" in message
    assert "modle: there is no such setting; nearest: model" in message
    assert "train.lora.r: must be greater than 0 (it is 0)" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it must be a mapping with the keys model, data and output_dir"),
        ("# only a comment\n", "is empty; it must be a mapping"),
        ("- model\n- data\n", "holds a list; it must be a mapping"),
        ("just words\n", "holds a str; it must be a mapping"),
        ("model: [a\ndata: b\n", "is not YAML: "),
        ("model: a\n\tdata: b\n", "is not YAML: "),
        ("model: a\nmodel: b\n", "is not YAML: the key 'model' stands twice (line 2, column 1)"),
        (MINIMAL + "train: {seed: 1}\ntrain: {seed: 2}\n", "the key 'train' stands twice (line 5, column 1)"),
        ("model: !!python/object/apply:os.getcwd []\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(refusal: Callable[..., str], text: str, message: str) -> None:
    refused = refusal(text)

    assert message in refused
    assert "my.yaml: " in refused
    assert len(refused.splitlines()) == 2


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: there is no such config file\n  What to do: check the path"):
        load_config(tmp_path / "none.yaml")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\n  What to do: name a YAML file"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes("output_dir: größe\n".encode("latin-1"))

    with pytest.raises(ConfigError, match=r"my\.yaml: is not UTF-8: .*\n  What to do: save it as UTF-8"):
        load_config(file)
