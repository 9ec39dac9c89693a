"""Other people's libraries at work on our shards as users of them would: one key of a file, a stream over HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import webdataset
from safetensors import safe_open
from safetensors.torch import load

from cache.features import StoredFeatures, VisionFeatures
from cache.formats import FORMATS
from cache.quantize import quantize, restore
from tests.cache.conftest import random_features
from tests.range_server import Site

from .conftest import KEYS

EXACT = {key: random_features(n, tokens=2 + n, dtype="bfloat16") for n, key in enumerate(KEYS)}
STORED: dict[str, dict[str, StoredFeatures]] = {
    "bfloat16": {**EXACT},
    "int8": {key: quantize(features, "int8") for key, features in EXACT.items()},
}


def resident_kilobytes() -> int:
    (line,) = [text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmRSS:")]
    return int(line.split()[1])


def test_stock_safetensors_maps_one_key_of_a_shard(tmp_path: Path) -> None:
    """Our reader does not map files (docs/decisions/0006-formats.md); whoever wants that has the stock library."""
    shard = tmp_path / "shard.safetensors"
    tensor = torch.randn(1 << 14, 1 << 10)  # 64 MB an entry
    big = VisionFeatures(tensor[:8192], tensor[8192:][None], torch.tensor([1, 64, 512]))
    FORMATS["safetensors"].write(shard, [(key, big) for key in KEYS[:2]])
    with safe_open(shard, "pt") as file:
        assert len(list(file.keys())) == 6
        before = resident_kilobytes()
        row = file.get_slice(f"{KEYS[1]}/image_embeds")[5:6]
        assert resident_kilobytes() - before < 16_000, "more than the row was read"
        assert torch.equal(row, big.image_embeds[5:6])
        assert torch.equal(file.get_tensor(f"{KEYS[0]}/image_embeds"), big.image_embeds)


# The library leaves pipes and files to the garbage collector to close.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by", ["its own reader", "a pipe"])
@pytest.mark.parametrize("storage", STORED)
def test_stock_webdataset_streams_shards_over_http(
    tmp_path: Path, serve: Callable[[Path], Site], storage: str, by: str
) -> None:
    if not shutil.which("curl"):
        pytest.skip("webdataset reads addresses by curl, which is not here")
    entries = list(STORED[storage].items())
    for number in range(2):
        FORMATS["webdataset"].write(tmp_path / f"shard-{number}.tar", entries[number::2])
    site = serve(tmp_path)
    urls = [f"{site.url}/shard-{number}.tar" for number in range(2)]
    if by == "a pipe":
        urls = [f"pipe:curl -s -f {url}" for url in urls]
    samples = {s["__key__"]: load(s["safetensors"]) for s in webdataset.WebDataset(urls, shardshuffle=False)}
    assert samples.keys() == STORED[storage].keys()
    for key, tensors in samples.items():
        stored = STORED[storage][key].tensors()
        assert tensors.keys() == stored.keys()
        assert all(torch.equal(tensors[name], stored[name]) for name in tensors)
        if storage == "int8":  # as docs/cache-format.md says it is undone
            embeds = (tensors["image_embeds"].float() * tensors["scales"][0, :, None]).bfloat16()
            assert torch.equal(embeds, restore(STORED[storage][key], torch.bfloat16).image_embeds)
    assert [wanted for _, wanted in site.log] == [None, None], "one stream a shard"
