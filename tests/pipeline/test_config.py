"""The YAML file, --set, and the messages for what cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.chain_record import snapshot
from pipeline.config import PipelineConfig
from pipeline.config_file import config_for_model, dump_config
from pipeline.experiments import experiments_of

from .conftest import MINIMAL


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


@pytest.mark.parametrize("folder", ["$SLURM_TMPDIR/features", "${TMPDIR}", "~/features"])
def test_variables_of_the_node_are_left_to_the_job(
    load: Callable[..., PipelineConfig], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what `pipeline submit` writes for the jobs, and in the configuration of each experiment."""
    for name in ("SLURM_TMPDIR", "TMPDIR", "HOME"):
        monkeypatch.setenv(name, "/of/the/login/node")
    config = load(MINIMAL, f"cache.stage_to={folder}", "experiments.a.train.seed=1")
    assert str(config.cache.stage_to) == folder
    assert yaml.safe_load(snapshot(config))["cache"]["stage_to"] == folder
    assert load(snapshot(config)) == load(dump_config(config)) == config
    assert [str(one.stages[0].settings.cache.stage_to) for one in experiments_of(config)] == [folder]


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


def test_a_model_alone_is_enough_for_predict() -> None:
    config = config_for_model("org/checkpoint", ["eval.max_new_tokens=5"])

    assert (config.model.name_or_path, config.eval.max_new_tokens) == ("org/checkpoint", 5)


def test_the_dump_is_plain_yaml(load: Callable[..., PipelineConfig]) -> None:
    content = yaml.safe_load(dump_config(load(MINIMAL)))

    assert content["train"]["report_to"] == ["tensorboard"]
    assert content["output_dir"] == "runs/first"
