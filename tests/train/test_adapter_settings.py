"""Adapters of other programs: what works is that which PEFT trained; what would mean something else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from cache.config import ModelConfig
from cache.errors import ConfigError
from train import adapter_settings
from train.adapter_settings import require_usable
from train.config import LoraConfig as OurLora
from train.config import TrainConfig
from train.head import Targets
from train.lora import continue_lora, load_adapter
from train.model import load_full_model, load_language_model

CPU = torch.device("cpu")
IDS = torch.arange(5, 40)[None]
TARGETS = r".*language_model\.layers\..*(q_proj|down_proj)"
ADVICE = "train first"

WORKS: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 3}},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"},
    "gaussian": {"init_lora_weights": "gaussian"},
    "eva": {"init_lora_weights": "eva"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "dora": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "the head": {"modules_to_save": ["lm_head"]},
    "the embedding": {"modules_to_save": ["embed_tokens"]},
    "some tokens": {"trainable_token_indices": [5, 6, 7]},
    "parameters": {"target_parameters": ["v_proj.weight"]},
}
ON_NF4 = ["rank_pattern", "dora", "olora", "eva", "the head", "lora_bias"]


def _settings(base: str) -> TrainConfig:
    precision = "fp32" if base == "none" else "bf16"
    return TrainConfig(precision=precision, quantization=base, device="cpu")  # type: ignore[arg-type]


def _autocast(base: str) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=base != "none")


def _logits(model: Any, base: str = "none") -> torch.Tensor:
    model.eval()
    with torch.no_grad(), _autocast(base):
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Callable[..., tuple[Path, torch.Tensor]]:
    """An adapter that PEFT trained on the stock model and saved, and the logits under it before it was saved."""

    def make(base: str = "none", **options: Any) -> tuple[Path, torch.Tensor]:
        torch.manual_seed(0)
        stock = load_full_model(ModelConfig(name_or_path=str(tiny)), _settings(base), CPU)
        given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
        model = get_peft_model(stock, LoraConfig(**given))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=2e-2)
        model.train()
        for _ in range(2):
            with _autocast(base):
                logits = model(input_ids=IDS).logits.float()
            torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(str(tmp_path / "peft"))
        return tmp_path / "peft", _logits(model, base)

    return make


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A folder with an adapter_config.json as PEFT writes it, but for some entries; its weights are not looked at."""

    def write(**entries: Any) -> Path:
        LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").save_pretrained(str(tmp_path / "other"))
        file = tmp_path / "other" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
        file.with_name("adapter_model.safetensors").touch()
        return file.parent

    return write


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's advice on some of these settings
@pytest.mark.parametrize("name", WORKS)
def test_what_works_gives_the_logits_that_peft_trained(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]], name: str
) -> None:
    adapter, expected = trained(**WORKS[name])

    require_usable(adapter, "none", ADVICE)
    language_model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)
    assert torch.equal(_logits(load_adapter(language_model, adapter)), expected)
    if name != "lora_bias":
        require_usable(adapter, "none", ADVICE, merging=True)
        whole = load_full_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)
        merged = load_adapter(whole, adapter).merge_and_unload()
        torch.testing.assert_close(_logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ON_NF4)
def test_what_works_on_nf4_too(tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]], name: str) -> None:
    adapter, expected = trained("nf4", **WORKS[name])

    require_usable(adapter, "nf4", ADVICE)
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("nf4"), CPU)
    assert torch.equal(_logits(load_adapter(model, adapter), "nf4"), expected)


@pytest.mark.parametrize("name", ["the head", "the embedding"])
def test_the_loss_sees_what_the_adapter_saved_whole(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]], name: str
) -> None:
    adapter, logits = trained(**WORKS[name])
    model = load_adapter(
        load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU), adapter
    ).eval()
    length = IDS.shape[1]
    targets = Targets(torch.arange(length - 1), IDS[0, 1:], torch.ones(length - 1))

    with torch.no_grad():
        positions = torch.arange(length)[None, None].expand(4, -1, -1)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        loss = model(
            input_ids=IDS,
            position_ids=positions,
            attention_mask=mask,
            image_positions=torch.empty(0, dtype=torch.int64),
            embeds=[],
            levels=[],
            targets=targets,
            use_cache=False,
        )

    expected = torch.nn.functional.cross_entropy(logits[0, :-1], IDS[0, 1:], reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("base", "entries", "message"),
    [
        ("none", {"peft_type": "IA3"}, "peft_type: 'IA3' is no LoRA"),
        ("none", {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' changed the base"),
        ("none", {"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq' changed the base's weights"),
        ("none", {"init_lora_weights": "corda"}, "init_lora_weights: 'corda' changed the base's weights"),
        ("nf4", {"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' does not go with a base in nf4"),
        ("fp8", {"init_lora_weights": "olora"}, "init_lora_weights: 'olora' does not go with a base in fp8"),
        ("fp8", {"use_dora": True}, "use_dora: True does not go with a base in fp8"),
        ("fp8", {"target_parameters": ["a.b"]}, "target_parameters: ['a.b'] does not go with a base in fp8"),
        ("none", {"layer_replication": [[0, 2], [1, 3]]}, "layer_replication: [[0, 2], [1, 3]] is not supported"),
        ("none", {"megatron_config": {"a": 1}}, "megatron_config: {'a': 1} is not supported"),
        ("none", {"alora_invocation_tokens": [3]}, "alora_invocation_tokens: [3] is not supported"),
        ("none", {"of_a_later_peft": 1}, "of_a_later_peft: 1 is not supported"),
    ],
)
def test_what_would_mean_something_else_is_refused(
    written: Callable[..., Path], base: Any, entries: dict[str, Any], message: str
) -> None:
    adapter = written(**entries)

    with pytest.raises(ConfigError) as refused:
        require_usable(adapter, base, ADVICE)

    assert message in refused.value.what
    assert refused.value.where == str(adapter / "adapter_config.json")


def test_settings_of_a_later_peft_that_are_off_are_no_obstacle(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {**adapter_settings._defaults(), "some_group_size": 16}
    monkeypatch.setattr(adapter_settings, "_defaults", lambda: defaults)

    require_usable(written(some_group_size=16), "none", "")
    with pytest.raises(ConfigError, match="some_group_size: 32 is not supported here"):
        require_usable(written(some_group_size=32), "none", "")


def test_plain_lora_is_usable_on_every_base(written: Callable[..., Path]) -> None:
    for base in ("none", "nf4", "fp8"):
        require_usable(written(), base, ADVICE, merging=True)  # type: ignore[arg-type]


def test_biases_of_lora_cannot_be_merged(written: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="lora_bias: True cannot be merged"):
        require_usable(written(lora_bias=True), "none", ADVICE, merging=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dora_adapter_on_fp8_is_indeed_another_one(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]]
) -> None:
    if torch.__version__ < "2.12":
        pytest.skip("FP8 products with a scale for each row are on the CPU from torch 2.12 on")
    off = {}
    for name, options in {"plain": {}, "dora": {"use_dora": True}}.items():
        adapter, expected = trained(**options)
        model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("fp8"), CPU)
        off[name] = float((_logits(load_adapter(model, adapter), "fp8").float() - expected).norm() / expected.norm())

    assert off["plain"] < 0.3 < off["dora"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pefts_own_loader_does_not_repeat_a_random_decomposition(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]]
) -> None:
    adapter, expected = trained(init_lora_weights="pissa_niter_4")
    stock = load_full_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)

    assert not torch.allclose(_logits(PeftModel.from_pretrained(stock, str(adapter))), expected, atol=0.1)


@pytest.mark.parametrize("name", ["pissa", "olora", "the head", "parameters", "bias"])
def test_training_further_what_is_not_the_same_training_is_refused(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]], name: str
) -> None:
    adapter, _ = trained(**WORKS[name])
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)
    setting = next(iter(WORKS[name]))

    with pytest.raises(ConfigError, match=rf"{setting}: .* there, not supported here"):
        continue_lora(model, OurLora(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]), adapter, seed=1)


def test_an_adapter_of_another_width_is_named_as_another_models(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]]
) -> None:
    adapter, _ = trained()
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)
    model.model.language_model.layers[1].self_attn.q_proj = torch.nn.Linear(64, 256, bias=False)

    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.q_proj is \(128, 128\) wide there, \(64, 256\) here"):
        continue_lora(model, OurLora(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]), adapter, seed=1)


def test_an_adapter_of_the_tower_is_told_from_one_of_another_model(
    tiny: Path, trained: Callable[..., tuple[Path, torch.Tensor]]
) -> None:
    adapter, _ = trained(target_modules=[*("q_proj", "qkv")])
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), _settings("none"), CPU)

    with pytest.raises(ConfigError, match="the adapter changes the vision tower"):
        load_adapter(model, adapter)
