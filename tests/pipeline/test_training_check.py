"""What cannot be trained is refused before anything is cached for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cache import flash
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from pipeline.training_check import check_training
from train.empty_model import empty_model

PLAIN = r".*language_model\..*(q_proj|v_proj)"
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture
def settings(make_config: Callable[..., PipelineConfig], data_dir: Path) -> Callable[..., PipelineConfig]:
    """The sample data with the given settings of training; other sections by name."""

    def make(train: dict[str, Any] | None = None, **sections: Any) -> PipelineConfig:
        splits = {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}
        return make_config(splits, train=train or {}, **sections)

    return make


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Callable[..., Path]:
    """An adapter as PEFT makes it for the tiny model, with other options."""

    def make(**options: Any) -> Path:
        from transformers import AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
        given = {"r": 4, "lora_alpha": 8, "target_modules": PLAIN, "task_type": "CAUSAL_LM", **options}
        get_peft_model(model, LoraConfig(**given)).save_pretrained(str(tmp_path / "start"))
        return tmp_path / "start"

    return make


def refused(config: PipelineConfig, finished: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        check_training(config, finished)
    assert "What to do: " in str(caught.value)
    return str(caught.value)


def test_what_can_be_trained_passes_and_leaves_nothing(
    settings: Callable[..., PipelineConfig], adapter: Callable[..., Path]
) -> None:
    environment = dict(os.environ)
    config = settings({"adapter": str(adapter()), "lora": LORA, "precision": "bf16", "quantization": "fp8"})

    check_training(config, ())

    assert dict(os.environ) == environment
    assert not config.output_dir.exists()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"split": "trian"}, "train.split is 'trian', but data.splits names only train, val"),
        ({"eval_split": "test"}, "train.eval_split is 'test', but data.splits names only train, val"),
        ({"lora": {"target_modules": ["q_prj"]}}, "train.lora.target_modules: 'q_prj' matches no linear layer"),
        ({"lora": {"target_modules": ["qkv"]}}, "train.lora.target_modules: 'qkv' lies in the vision tower"),
        ({"optim": "adamm"}, "adamm is not a valid OptimizerNames"),
        ({"attention": "flex", "device": "cpu"}, "train.attention: flex needs a GPU"),
        ({"metric_for_best_model": "loss_answer"}, "the evaluation split 'val' has no such stage"),
        ({"adapter": "/no/such/adapter"}, "/no/such/adapter: there is no adapter here"),
    ],
)
def test_a_setting_that_cannot_work(
    settings: Callable[..., PipelineConfig], train: dict[str, Any], message: str
) -> None:
    assert message in refused(settings(train))


def test_an_extra_that_is_not_installed(
    settings: Callable[..., PipelineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_installed_version", lambda: None)
    config = settings({"attention": "flash", "precision": "bf16", "device": "auto"})
    assert "train.attention: flash needs the package flash-attn-4" in refused(config)

    tower = CacheConfig(tower="fast", attn_implementation="flash_attention_4")
    config = settings({}).model_copy(update={"cache": tower})
    assert "cache.attn_implementation: flash_attention_4 needs the package flash-attn-4" in refused(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 8}, "train.lora.r: 8 there, 4 now"),
        ({"target_modules": ["q_proj"]}, "train.lora alone has 4 modules: v_proj"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: 'olora' there, not supported here"),
    ],
)
def test_an_adapter_that_is_another_one(
    settings: Callable[..., PipelineConfig], adapter: Callable[..., Path], options: dict[str, Any], message: str
) -> None:
    assert message in refused(settings({"adapter": str(adapter(**options)), "lora": LORA}))


def test_an_adapter_of_another_model(
    settings: Callable[..., PipelineConfig], adapter: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    wider = tmp_path / "wider"
    shutil.copytree(tiny, wider)
    config = json.loads((wider / "config.json").read_text())
    config["text_config"]["hidden_size"] = 256
    (wider / "config.json").write_text(json.dumps(config))

    message = refused(settings({"adapter": str(adapter()), "lora": LORA}, model=str(wider)))

    assert "self_attn.q_proj is (128, 128) wide there, (256, 128) here" in message


def test_fp8_on_a_mixture_of_experts(settings: Callable[..., PipelineConfig], tiny_moe: Path) -> None:
    assert "a mixture of experts keeps the others elsewhere" in refused(
        settings({"precision": "bf16", "quantization": "fp8"}, model=str(tiny_moe))
    )


def test_fp8_on_odd_widths(settings: Callable[..., PipelineConfig], tiny: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(tiny, odd)
    config = json.loads((odd / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 392
    (odd / "config.json").write_text(json.dumps(config))

    assert "multiples of 16" in refused(settings({"precision": "bf16", "quantization": "fp8"}, model=str(odd)))


def test_weights_that_are_missing_or_cut_off(
    settings: Callable[..., PipelineConfig], tiny: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    whole = (broken / "model.safetensors").read_bytes()
    names = {"model.visual.a": "model-1.safetensors", "model.b": "model-2.safetensors"}
    config = settings(model=str(broken))

    (broken / "model.safetensors").write_bytes(whole[:-1000])
    assert "model.safetensors: the weights cannot be read" in refused(config)
    (broken / "model.safetensors").rename(broken / "model-1.safetensors")
    (broken / "model-1.safetensors").write_bytes(whole)
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "model-2.safetensors: the weights cannot be read" in refused(config)


def test_a_config_that_makes_no_model(settings: Callable[..., PipelineConfig], tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 0
    config["text_config"]["head_dim"] = -1
    (broken / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"makes no model|cannot load the model's config"):
        empty_model(ModelConfig(name_or_path=str(broken)))


def test_stages_make_each_others_adapters(settings: Callable[..., PipelineConfig], tmp_path: Path) -> None:
    same = {"stages": {"one": {}, "two": {}}}
    listed = {"one": {"train": {"lora": {"target_modules": ["q_proj", "v_proj"]}}}}
    turned = {"two": {"train": {"lora": {"target_modules": ["v_proj", "q_proj"]}}}}
    check_training(settings(experiments={"a": same, "b": {"stages": {**listed, **turned}}}), ())

    other = {"stages": {"one": {}, "two": {"train": {"lora": {"r": 8}}}}}
    message = refused(settings(experiments={"a": same, "b": other}))
    assert "b/two: it starts from the adapter of b/one, which will not be as train.lora says" in message
    assert "train.lora.r: 4 there, 8 now" in message

    elsewhere = {"train": {"adapter": str(tmp_path / "run" / "a" / "two" / "adapter")}}
    message = refused(settings(experiments={"a": same, "b": elsewhere}))
    assert "b: " in message
    assert "a/two makes it, and experiments do not wait for each other" in message


def test_a_stage_may_spell_the_folder_of_the_one_before_otherwise(
    settings: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for spelled in ("run/a/one/adapter", str(tmp_path / "link" / "run" / "a" / "one" / "adapter")):
        stages = {"one": {}, "two": {"train": {"adapter": spelled}}}
        check_training(settings(experiments={"a": {"stages": stages}}), ())


def test_a_finished_stage_is_not_asked_about(settings: Callable[..., PipelineConfig]) -> None:
    wrong = {"train": {"adapter": "/no/such/adapter"}}
    config = settings(experiments={"a": wrong, "b": {}})

    check_training(config, ("a",))
    assert "a: there is no adapter here" in refused(config, ("b",))


def test_a_run_folder_of_another_run(settings: Callable[..., PipelineConfig]) -> None:
    config = settings()
    (config.output_dir / "adapter").mkdir(parents=True)
    (config.output_dir / "run.json").write_text(json.dumps({"settings": {"train.seed": 1}, "finished": None}))

    assert "the run folder holds a run with other settings" in refused(config)
