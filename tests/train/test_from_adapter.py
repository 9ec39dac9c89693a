"""A run that starts from a saved adapter: PEFT's own loading is the oracle; what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from cache.config import ModelConfig
from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from train.config import LoraConfig, TrainConfig
from train.job import is_finished
from train.lora import add_lora, continue_lora
from train.model import load_language_model

from .conftest import Run, job_of

CPU = torch.device("cpu")
SETTINGS = {"effective_batch_size": 5, "max_steps": 2, "learning_rate": 3e-3}
LORA = LoraConfig(r=4)


def _base(tiny: Path, kind: str = "fp32") -> Any:
    """The frozen base in fp32 or bf16, or in NF4."""
    precision, quantization = ("bf16", "nf4") if kind == "nf4" else (kind, "none")
    config = TrainConfig(precision=precision, quantization=quantization, device="cpu")  # type: ignore[arg-type]
    return load_language_model(ModelConfig(name_or_path=str(tiny)), config, CPU)


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter none of whose weights is zero."""
    model = add_lora(_base(tiny), LORA, seed=3)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture
def changed(adapter: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the adapter with other entries in adapter_config.json."""

    def change(**entries: Any) -> Path:
        copy = tmp_path / "changed"
        shutil.copytree(adapter, copy)
        file = copy / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
        return copy

    return change


def _logits_and_gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.train()
    ids = torch.arange(1, 25)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return logits.detach(), gradients


@pytest.mark.parametrize("kind", ["fp32", "bf16", "nf4"])
def test_logits_and_first_gradients_are_those_of_pefts_own_loading(tiny: Path, adapter: Path, kind: str) -> None:
    ours = continue_lora(_base(tiny, kind), LORA, adapter, seed=1)
    theirs = PeftModel.from_pretrained(_base(tiny, kind), str(adapter), is_trainable=True)

    logits, gradients = _logits_and_gradients(ours)
    expected_logits, expected = _logits_and_gradients(theirs)

    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys()
    assert all("lora_" in name for name in gradients)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize("kind", ["fp32", "bf16", "nf4"])
def test_the_weights_are_taken_exactly_and_kept_in_fp32(tiny: Path, adapter: Path, tmp_path: Path, kind: str) -> None:
    model = continue_lora(_base(tiny, kind), LORA, adapter, seed=1)

    model.save_pretrained(str(tmp_path / "again"))
    first, again = (load_file(f / "adapter_model.safetensors") for f in (adapter, tmp_path / "again"))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_dropout_is_that_of_the_settings(tiny: Path, adapter: Path) -> None:
    model = continue_lora(_base(tiny), LoraConfig(r=4, lora_dropout=0.25), adapter, seed=1)

    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    assert model.peft_config["default"].lora_dropout == 0.25


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 8}, "train.lora.r: 4 there, 8 now"),
        ({"lora_alpha": 16}, "train.lora.lora_alpha: 32 there, 16.0 now"),
        ({"use_rslora": True}, "train.lora.use_rslora: False there, True now"),
        (
            {"target_modules": ["q_proj"]},
            "the adapter alone has 24 modules: down_proj, gate_proj, k_proj, o_proj, up_proj, v_proj, e.g. "
            "model.language_model.layers.0.mlp.down_proj",
        ),
    ],
)
def test_an_adapter_unlike_train_lora_is_refused_with_what_differs(
    tiny: Path, adapter: Path, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        continue_lora(_base(tiny), LoraConfig(**{"r": 4, **lora}), adapter, seed=1)

    assert message in refused.value.what
    assert (refused.value.where, "train.adapter: null" in str(refused.value.do)) == (str(adapter), True)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"use_dora": True}, "use_dora: True there, not supported here"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern: {'q_proj': 4} there, not supported here"),
        ({"peft_type": "IA3"}, "peft_type: 'IA3' there, 'LORA' is needed"),
    ],
)
def test_what_another_program_may_have_saved_is_refused(
    tiny: Path, changed: Callable[..., Path], entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"the adapter to start from is not as train\.lora says") as refused:
        continue_lora(_base(tiny), LORA, changed(**entries), seed=1)

    assert message in refused.value.what


def test_modules_that_the_adapter_lacks_are_named(tiny: Path, changed: Callable[..., Path]) -> None:
    folder = changed()
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if ".v_proj." not in name}, file)

    with pytest.raises(ConfigError, match=r"train\.lora alone has 4 modules: v_proj"):
        continue_lora(_base(tiny), LORA, folder, seed=1)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_refused(tiny: Path, changed: Callable[..., Path], name: str) -> None:
    folder = changed()
    (folder / name).write_bytes((folder / name).read_bytes()[:40])

    with pytest.raises(ConfigError, match="is damaged") as refused:
        continue_lora(_base(tiny), LORA, folder, seed=1)

    assert refused.value.where == str(folder / name)


def test_a_run_starts_from_the_adapter_and_leaves_it_alone(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    one = run_cached("one", **SETTINGS)
    before = one.adapter()
    # The first step of a warm-up has the learning rate 0.
    still = run_cached(
        "still", **{**SETTINGS, "max_steps": 1}, warmup_steps=1, adapter=str(tmp_path / "one" / "adapter")
    )
    two = run_cached("two", **SETTINGS, adapter=str(tmp_path / "one" / "adapter"))
    fresh = run_cached("fresh", **{**SETTINGS, "max_steps": 1})

    assert all(torch.equal(still.adapter()[name], tensor) for name, tensor in before.items())
    assert any(not torch.equal(two.adapter()[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(one.adapter()[name], tensor) for name, tensor in before.items())
    assert two.losses()[1] < fresh.losses()[1]


def test_a_missing_adapter_is_told_before_anything_is_loaded(
    run_cached: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise AssertionError("no model is loaded")

    monkeypatch.setattr("train.run.load_language_model", refuse)

    with pytest.raises(ConfigError, match="there is no adapter here") as refused:
        run_cached("two", **SETTINGS, adapter=str(tmp_path / "nowhere"))

    assert "train the stage before first" in str(refused.value.do)


def test_a_predecessor_trained_again_is_noticed(
    run_cached: Callable[..., Run], make_config: Callable[..., PipelineConfig], data_dir: Path, tmp_path: Path
) -> None:
    run_cached("one", **SETTINGS)
    start = {"adapter": str(tmp_path / "one" / "adapter")}
    run_cached("two", **SETTINGS, **start)
    sections = {"output_dir": str(tmp_path / "two"), "train": {"eval_split": None, **SETTINGS, **start}}
    splits = {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}
    job = job_of(make_config(splits, cache={"dir": str(tmp_path / "features")}, **sections))
    assert is_finished(job)

    shutil.rmtree(tmp_path / "one")
    assert not is_finished(job)
    run_cached("one", **{**SETTINGS, "learning_rate": 1e-3})

    assert not is_finished(job)
    with pytest.raises(ConfigError, match=r"train\.adapter: 'xxh3:[0-9a-f]{32}' there, 'xxh3:[0-9a-f]{32}' now"):
        run_cached("two", **SETTINGS, **start)
