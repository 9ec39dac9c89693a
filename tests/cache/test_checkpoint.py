"""Checkpoints that are not what they should be: each gives one error that names file or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import cache.checkpoint
from cache.checkpoint import INDEX_FILE, SINGLE_FILE, VisionWeights, fetch_optional, load_hf_config
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError
from cache.vision_tower import VisionTower

from .conftest import weight_map


def load(checkpoint: Path) -> VisionTower:
    return VisionTower.load(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(device="cpu"))


def test_looks_each_file_up_once(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counting(model: ModelConfig, name: str) -> Path | None:
        looked.append(name)
        return fetch_optional(model, name)

    monkeypatch.setattr(cache.checkpoint, "fetch_optional", counting)
    VisionWeights.find(ModelConfig(name_or_path=str(sharded)))
    assert len(looked) == len(set(looked))


def test_the_digest_sees_every_bit_of_the_tower_and_nothing_else(checkpoint: Path) -> None:
    model = ModelConfig(name_or_path=str(checkpoint))
    digests = {VisionWeights.find(model).digest()}
    tensors = load_file(checkpoint / SINGLE_FILE)
    tower = [name for name in tensors if name.startswith("model.visual.")]
    tensors["model.language_model.norm.weight"] += 1
    save_file(tensors, checkpoint / SINGLE_FILE)
    assert {VisionWeights.find(model).digest()} == digests
    for name in tower[::7]:
        bits = tensors[name].view(torch.int32).flatten()
        bits[-1] ^= 1
        save_file(tensors, checkpoint / SINGLE_FILE)
        digests.add(VisionWeights.find(model).digest())
    one, two = "model.visual.blocks.0.norm1.weight", "model.visual.blocks.0.norm1.bias"
    for change in (
        {one: tensors[two], two: tensors[one]},
        {one: tensors[one][None]},
        {one: tensors[one].view(torch.int32)},
    ):
        save_file(tensors | change, checkpoint / SINGLE_FILE)
        digests.add(VisionWeights.find(model).digest())
    assert len(digests) == 1 + len(tower[::7]) + 3


def spoiled(checkpoint: Path) -> Iterator[tuple[str, Any, str]]:
    yield "missing", lambda t: t.pop("model.visual.blocks.1.mlp.linear_fc1.bias"), "lacks 1 tower tensors.*blocks.1.mlp"
    yield "shape", lambda t: t.update({"model.visual.pos_embed.weight": torch.zeros(9, 64)}), r"pos_embed.*\(9, 64\)"
    yield "unknown", lambda t: t.update({"model.visual.extra": torch.zeros(1)}), "visual.extra|extra.*no such"
    yield "none", lambda t: [t.pop(n) for n in list(t) if n.startswith("model.visual.")], "no vision tower"


@pytest.mark.parametrize("number", range(4), ids=[name for name, _, _ in spoiled(Path())])
def test_weights_that_do_not_fit_are_named(checkpoint: Path, number: int) -> None:
    _, spoil, message = list(spoiled(checkpoint))[number]
    tensors = load_file(checkpoint / SINGLE_FILE)
    spoil(tensors)
    save_file(tensors, checkpoint / SINGLE_FILE)
    with pytest.raises(ConfigError, match=message):
        load(checkpoint)


def test_pickled_weights_are_never_read(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / SINGLE_FILE)
    (checkpoint / SINGLE_FILE).unlink()
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickled \.bin files never are"):
        load(checkpoint)


@pytest.mark.parametrize("content", [b"", b"damaged", b"\xff" * 100, None], ids=["empty", "short", "noise", "cut"])
def test_a_damaged_weight_file_is_named(checkpoint: Path, content: bytes | None) -> None:
    file = checkpoint / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(ConfigError, match="weights cannot be read") as caught:
        load(checkpoint)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/elsewhere.safetensors", "a/b.safetensors", "..", ""])
def test_an_index_does_not_lead_out_of_its_folder(sharded: Path, tiny: Path, file: str) -> None:
    shutil.copy(tiny / SINGLE_FILE, sharded.parent / "elsewhere.safetensors")
    weights = weight_map(sharded)
    weights["model.visual.pos_embed.weight"] = file
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match=r"outside its folder|has no file"):
        load(sharded)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"model.visual.a": 1}}', "\0"],
)
def test_an_index_that_is_none_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(ConfigError, match="weight index") as caught:
        load(sharded)
    assert caught.value.where == str(sharded / INDEX_FILE)


def test_an_index_that_promises_too_much_is_named(sharded: Path) -> None:
    weights = weight_map(sharded)
    weights["model.visual.pos_embed.weight"] = weights["lm_head.weight"]
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ConfigError, match="pos_embed"):
        load(sharded)


def test_a_file_that_the_index_names_and_is_not_there(sharded: Path) -> None:
    file = weight_map(sharded)["model.visual.pos_embed.weight"]
    (sharded / file).unlink()
    with pytest.raises(ConfigError, match=f"has no file {file}"):
        load(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 5}, "lacks 12 tower tensors"),
        ({"depth": 3}, r"blocks\.3.* no such tensor"),
        ({"depth": "many"}, "depth.*expected int"),
        ({"hidden_size": 0}, "no vision tower can be built"),
        ({"hidden_act": "none"}, "no vision tower can be built"),
        ({"deepstack_visual_indexes": None}, "deepstack_visual_indexes"),
    ],
)
def test_a_config_that_is_not_of_these_weights(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    file = checkpoint / "config.json"
    settings = json.loads(file.read_text())
    settings["vision_config"] |= change
    file.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=message) as caught:
        load(checkpoint)
    assert caught.value.where == str(checkpoint)


@pytest.mark.parametrize("text", [None, "", "{", "null", "[]", "{}", '{"model_type": "llama"}', '{"model_type": "x"}'])
def test_a_folder_that_is_no_checkpoint_of_the_family(checkpoint: Path, text: str | None) -> None:
    (checkpoint / "config.json").unlink()
    if text is not None:
        (checkpoint / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(checkpoint)
    assert caught.value.where == str(checkpoint)
    assert caught.value.do


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such/model", "./models/here", "../models/there", "a/b/c"])
def test_a_misspelt_folder_is_not_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.cached_file", lambda *_, **__: pytest.fail("the hub was asked"))
    model = ModelConfig(name_or_path=name)
    for look in (load_hf_config, VisionWeights.find):
        with pytest.raises(ConfigError, match="there is no such folder") as caught:
            look(model)
        assert caught.value.where == name
        assert str(Path(name).absolute()) in caught.value.what
