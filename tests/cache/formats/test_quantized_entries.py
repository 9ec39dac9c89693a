"""Quantised entries in every format: four tensors, every bit kept, readable by the stock libraries."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest
import torch
from safetensors.torch import load, load_file

from cache.features import QUANTIZED_DTYPES, QuantizedFeatures, VisionFeatures
from cache.formats import FORMATS
from cache.quantize import quantize
from tests.cache.conftest import random_features

STORAGE = list(QUANTIZED_DTYPES)
KEY = f"{7:064x}"


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("levels", [0, 3])
def test_every_format_keeps_every_bit(tmp_path: Path, form: str, storage: str, levels: int) -> None:
    stored = [quantize(random_features(n, tokens=n + 3, levels=levels), storage) for n in range(3)]
    path = tmp_path / f"shard{FORMATS[form].suffix}"
    keys = [f"{n:064x}" for n in range(3)]
    FORMATS[form].write(path, list(zip(keys, stored, strict=True)))
    reader = FORMATS[form].open(path)
    for key, expected in zip(keys, stored, strict=True):
        size = reader.extents(key).out_bytes
        for out in (None, torch.full((size + 9,), 7, dtype=torch.uint8)):
            read = reader.read(key, out)
            assert isinstance(read, QuantizedFeatures)
            for name, tensor in expected.tensors().items():
                other = read.tensors()[name]
                assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))
            if out is not None:
                memory = range(out.data_ptr(), out.data_ptr() + size)
                assert all(t.data_ptr() in memory for t in (read.image_embeds, read.scales))
                assert bool((out[size:] == 7).all())


@pytest.mark.parametrize("storage", STORAGE)
def test_the_stock_libraries_read_it(tmp_path: Path, storage: str) -> None:
    stored = quantize(random_features(0), storage)
    paths = {name: tmp_path / f"shard{form.suffix}" for name, form in FORMATS.items()}
    for name, form in FORMATS.items():
        form.write(paths[name], [(KEY, stored)])
    tensors = load_file(paths["safetensors"])
    assert torch.equal(tensors[f"{KEY}/image_embeds"].view(torch.uint8), stored.image_embeds.view(torch.uint8))
    assert torch.equal(tensors[f"{KEY}/scales"], stored.scales)
    content = paths["webdataset"].read_bytes()
    member = load(content[512 : 512 + int(content[124:135], 8)])
    assert torch.equal(member["deepstack_features"].view(torch.uint8), stored.deepstack_features.view(torch.uint8))
    with h5py.File(paths["hdf5"], "r") as file:
        embeds = torch.from_numpy(file[KEY]["image_embeds"][()])
        assert embeds.dtype == (torch.int8 if storage == "int8" else torch.uint8)
        assert file[KEY]["image_embeds"].attrs.get("dtype") == (None if storage == "int8" else "float8_e4m3fn")
        assert torch.equal(embeds.view(torch.uint8), stored.image_embeds.view(torch.uint8))


@pytest.mark.parametrize("form", list(FORMATS))
def test_an_entry_without_its_scales_is_refused(tmp_path: Path, form: str) -> None:
    stored = quantize(random_features(0), "int8")
    bare = VisionFeatures(stored.image_embeds, stored.deepstack_features, stored.image_grid_thw)
    path = tmp_path / f"shard{FORMATS[form].suffix}"
    FORMATS[form].write(path, [(KEY, bare)])
    with pytest.raises(ValueError, match="dtypes"):
        FORMATS[form].open(path).read(KEY)
