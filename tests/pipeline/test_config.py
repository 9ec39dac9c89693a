"""The YAML file, --set, and the messages for what cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cache.errors import ConfigError
from pipeline.config import PipelineConfig, config_for_model, dump_config, load_config

MINIMAL = "model: org/checkpoint\ndata: {splits: {train: train.jsonl, val: val.jsonl}}\noutput_dir: runs/first\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PipelineConfig]:
    """Loads a text as my.yaml, with overrides."""

    def load_text(text: str, *overrides: str) -> PipelineConfig:
        file = tmp_path / "my.yaml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, list(overrides))

    return load_text


@pytest.fixture
def refusal(load: Callable[..., PipelineConfig]) -> Callable[..., str]:
    """The message with which a text or an override is refused."""

    def message(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert caught.value.exit_code == 2
        assert "What to do: " in str(caught.value)
        return str(caught.value)

    return message


def test_three_keys_are_enough(load: Callable[..., PipelineConfig]) -> None:
    config = load(MINIMAL)

    assert config.model.name_or_path == "org/checkpoint"
    assert config.data.splits["val"].path == "val.jsonl"
    assert config.cache_dir == Path("runs/first/features")
    assert (config.cache.dtype, config.cache.max_pixels, config.cache.format) == ("bfloat16", None, "safetensors")
    assert (config.train.effective_batch_size, config.train.learning_rate) == (16, 1e-4)
    assert (config.train.lora.r, config.train.lora.lora_alpha, config.train.lora.target_modules) == (
        16,
        32,
        "all-linear",
    )
    assert (config.train.precision, config.train.quantization, config.train.resume) == ("bf16", "none", True)
    assert (config.data.on_bad_record, config.data.max_bad_share, config.data.format) == ("fail", 0.01, "auto")
    assert config.eval.max_new_tokens == 128


def test_what_is_dumped_loads_as_an_equal_configuration(load: Callable[..., PipelineConfig]) -> None:
    overrides = [
        "train.lora.target_modules=[q_proj, v_proj]",
        "train.report_to=[tensorboard, wandb]",
        "data.splits.train.image_root=bilder/größe",
        "cache.dir=/shared/features",
        "cache.max_pixels=1048576",
        "train.eval_split=null",
        "model.revision=v1",
    ]
    config = load(MINIMAL, *overrides)

    assert load(dump_config(config)) == config


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.learning_rate=1e-4", 1e-4),
        ("train.learning_rate=2.5e-05", 2.5e-5),
        ("train.lora.r=32", 32),
        ("train.lora.lora_alpha=64", 64.0),
        ("train.gradient_checkpointing=true", True),
        ("train.tf32=false", False),
        ("train.eval_split=null", None),
        ("train.save_steps=", None),
        ("cache.min_pixels=65536", 65536),
        ("cache.dtype=float32", "float32"),
        ("cache.dir=some where/features", Path("some where/features")),
        ("output_dir=runs/a=b", Path("runs/a=b")),
        ("train.lora.target_modules=[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("train.report_to=[none]", ("none",)),
        ("model=org/other", None),
        ("model.revision=main", "main"),
        ("data.stage_format='{name}: {target}'", "{name}: {target}"),
    ],
)
def test_an_override_has_the_type_of_its_setting(
    load: Callable[..., PipelineConfig], override: str, value: object
) -> None:
    config: Any = load(MINIMAL, override)
    if override.startswith("model="):
        assert config.model.name_or_path == "org/other"
        return
    for name in override.partition("=")[0].split("."):
        config = getattr(config, name)

    assert config == value
    assert type(config) is type(value)


def test_overrides_reach_into_splits(load: Callable[..., PipelineConfig]) -> None:
    config = load(
        MINIMAL,
        "data.splits.train.image_root=images",
        "data.splits.test=test.jsonl",
        "data.splits.test.hub_split=validation",
        "data.splits.val={path: other.jsonl, image_root: elsewhere}",
    )

    splits = config.data.splits
    assert (splits["train"].path, splits["train"].image_root) == ("train.jsonl", Path("images"))
    assert (splits["test"].path, splits["test"].hub_split) == ("test.jsonl", "validation")
    assert (splits["val"].path, splits["val"].image_root) == ("other.jsonl", Path("elsewhere"))


def test_the_last_override_of_a_key_wins(load: Callable[..., PipelineConfig]) -> None:
    assert load(MINIMAL, "train.lora.r=8", "train.lora.r=4").train.lora.r == 4


def test_a_section_with_nothing_below_it_has_its_defaults(load: Callable[..., PipelineConfig]) -> None:
    assert load(MINIMAL + "train:\ncache:\n") == load(MINIMAL)


def test_a_tilde_is_the_home_folder(load: Callable[..., PipelineConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(
        MINIMAL, "output_dir=~/runs", "cache.dir=~/features", "data.image_root=~/images", "model=~/checkpoint"
    )

    assert config.output_dir == Path("/home/someone/runs")
    assert config.cache_dir == Path("/home/someone/features")
    assert config.data.image_root == Path("/home/someone/images")
    assert config.model.name_or_path == "/home/someone/checkpoint"


def test_a_byte_order_mark_is_no_part_of_the_first_key(load: Callable[..., PipelineConfig]) -> None:
    assert load("\ufeff" + MINIMAL) == load(MINIMAL)


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
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(
    refusal: Callable[..., str], key: str, nearest: str
) -> None:
    message = refusal(MINIMAL, f"{key}=1")

    assert f"{key}: there is no such setting; nearest: {nearest}" in message
    assert "(from --set)" in message


def test_an_unknown_key_like_no_other_is_refused_with_all_of_its_section(refusal: Callable[..., str]) -> None:
    message = refusal(MINIMAL + "eval: {zzz: 1}\n")

    assert "eval.zzz: there is no such setting; nearest: eval.batch_size, eval.limit" in message
    assert "--set" not in message


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


def test_a_model_alone_is_enough_for_predict() -> None:
    config = config_for_model("org/checkpoint", ["eval.max_new_tokens=5"])

    assert (config.model.name_or_path, config.eval.max_new_tokens) == ("org/checkpoint", 5)


def test_the_dump_is_plain_yaml(load: Callable[..., PipelineConfig]) -> None:
    content = yaml.safe_load(dump_config(load(MINIMAL)))

    assert content["train"]["report_to"] == ["tensorboard"]
    assert content["output_dir"] == "runs/first"
