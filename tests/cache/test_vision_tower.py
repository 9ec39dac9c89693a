"""The tower alone against the stock full model, and what is read of a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from transformers.image_utils import load_image

import cache.checkpoint
from cache.checkpoint import INDEX_FILE, SINGLE_FILE, VisionWeights, fetch_optional
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError
from cache.fingerprint import expected_fingerprint
from cache.preprocess import ImageProcessor, decode
from cache.vision_tower import VisionTower, resolve_device

MAX_PIXELS = 128 * 128


def load(checkpoint: Path, **settings: Any) -> VisionTower:
    return VisionTower.load(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(device="cpu", **settings))


def images(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "images").iterdir())


@pytest.fixture
def checkpoint(tmp_path: Path, tiny: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))


@pytest.fixture
def sharded(tmp_path: Path, tiny: Path) -> Path:
    """The same checkpoint in files of at most 1 MB, with an index."""
    folder = Path(shutil.copytree(tiny, tmp_path / "sharded", ignore=shutil.ignore_patterns("*.safetensors")))
    model = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="1MB")
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]


@dataclass
class Reads:
    """What was read of weight files."""

    tensors: list[str]
    files: set[str]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Records every tensor that is read; the library does the reading."""
    found = Reads([], set())

    class Recording:
        def __init__(self, path: Path, **options: Any) -> None:
            found.files.add(Path(path).name)
            self._file = safe_open(path, **options)

        def __enter__(self) -> Recording:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            found.tensors.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(cache.checkpoint, "safe_open", Recording)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["tiny", "tiny_moe"])
def test_equals_the_stock_model_bit_for_bit(
    request: pytest.FixtureRequest, data_dir: Path, family: str, dtype: str
) -> None:
    checkpoint = request.getfixturevalue(family)
    settings = {"dtype": dtype, "max_pixels": MAX_PIXELS}
    tower = load(checkpoint, **settings)
    processor = ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(**settings))
    stock = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).model
    stock_processor = AutoImageProcessor.from_pretrained(checkpoint)
    stock_processor.size = {**dict(stock_processor.size), "longest_edge": MAX_PIXELS}
    for file in images(data_dir):
        image = decode(file.read_bytes(), where=file.name, max_image_pixels=10**9)
        (features,) = tower.encode(*([part] for part in processor(image, where=file.name)))
        inputs = stock_processor(images=[load_image(str(file))], return_tensors="pt")
        with torch.no_grad():
            expected = stock.get_image_features(**inputs, return_dict=True)
        assert features.image_embeds.dtype == getattr(torch, dtype)
        assert torch.equal(features.image_embeds, expected.pooler_output[0])
        assert torch.equal(features.deepstack_features, torch.stack(list(expected.deepstack_features)))
        assert torch.equal(features.image_grid_thw, inputs["image_grid_thw"][0])
        assert features.image_embeds.std() > 0.01, "a silent tower would equal anything"


def test_a_batch_is_split_at_the_images(tiny: Path) -> None:
    tower = load(tiny, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    grids = [torch.tensor([1, 4, 6]), torch.tensor([1, 2, 2]), torch.tensor([1, 6, 4])]
    pixels = [torch.randn((int(grid.prod()), 3 * 2 * 16 * 16), generator=generator) for grid in grids]
    together = tower.encode(pixels, grids)
    assert [f.num_tokens for f in together] == [6, 1, 6]
    for features, pixel_values, grid in zip(together, pixels, grids, strict=True):
        (alone,) = tower.encode([pixel_values], [grid])
        torch.testing.assert_close(features.image_embeds, alone.image_embeds)
        torch.testing.assert_close(features.deepstack_features, alone.deepstack_features)
        assert torch.equal(features.image_grid_thw, grid)


def test_is_frozen_and_gives_no_graph(tiny: Path) -> None:
    tower = load(tiny, dtype="float32")
    assert not tower.module.training
    assert not any(p.requires_grad for p in tower.module.parameters())
    (features,) = tower.encode([torch.zeros(4, 1536)], [torch.tensor([1, 2, 2])])
    assert not features.image_embeds.requires_grad
    assert not features.image_embeds.is_inference(), "an inference tensor cannot enter the language model's graph"


@pytest.mark.parametrize("family", ["tiny", "tiny_moe"])
def test_reads_the_tensors_of_the_tower_only(request: pytest.FixtureRequest, reads: Reads, family: str) -> None:
    checkpoint = request.getfixturevalue(family)
    load(checkpoint)
    with safe_open(checkpoint / SINGLE_FILE, framework="pt") as file:
        names = list(file.keys())
    assert sorted(reads.tensors) == [name for name in sorted(names) if name.startswith("model.visual.")]
    assert len(reads.tensors) < len(names)


def test_opens_only_the_files_that_hold_some_of_the_tower(sharded: Path, tiny: Path, reads: Reads) -> None:
    files = weight_map(sharded)
    of_tower = {file for name, file in files.items() if name.startswith("model.visual.")}
    others = set(files.values()) - of_tower
    assert others, "the test needs a file without tower tensors"
    for number, file in enumerate(sorted(others)):
        if number % 2:
            (sharded / file).write_bytes(b"damaged")
        else:
            (sharded / file).unlink()
    tower = load(sharded)
    assert reads.files == of_tower
    for (name, one), (_, other) in zip(
        tower.module.named_parameters(), load(tiny).module.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    model, whole = ModelConfig(name_or_path=str(sharded)), ModelConfig(name_or_path=str(tiny))
    assert expected_fingerprint(model, CacheConfig()).name == expected_fingerprint(whole, CacheConfig()).name


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
    assert len(digests) == 1 + len(tower[::7])


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
    with pytest.raises(ConfigError, match="pickled .bin files never are"):
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
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"model.visual.a": 1}}', "\0"]
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


@pytest.mark.parametrize("name", ["cuda:99", "gpu", "meta", "mps", "cuda:-1", "", "cuda:x"])
def test_a_device_that_is_not_there(tiny: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="auto"):
        VisionTower.load(ModelConfig(name_or_path=str(tiny)), CacheConfig(device=name))


def test_auto_is_a_device_that_is_there() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash_attn may be installed where there is a GPU")
def test_an_attention_that_is_not_installed(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="attn_implementation"):
        load(tiny, attn_implementation="flash_attention_2")
