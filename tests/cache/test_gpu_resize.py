"""Images resized on a GPU: the numbers of the stock processor called with device="cuda", bit for bit.

What needs no GPU is tested everywhere; the halves together also on a CPU, where torchvision is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image
from transformers.utils import is_torchvision_available

from cache.build import CacheBuilder
from cache.config import CacheConfig, ModelConfig
from cache.errors import CacheError, ConfigError, DataError
from cache.find import find_cache
from cache.fingerprint import Fingerprint, expected_fingerprint
from cache.gpu_resize import decoded, pixel_values
from cache.pixels import load_pixels, values_on
from cache.preprocess import ImageProcessor, decode
from cache.reader import FeatureCache
from cache.records import ImageRef
from cache.vision_tower import VisionTower
from pipeline.config import PipelineConfig

from .conftest import SILENT, builder_of, draw_images, write_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HAS_TORCHVISION = is_torchvision_available()
NEEDS_TORCHVISION = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision is not installed")
NEEDS_GPU = pytest.mark.skipif(
    not (HAS_TORCHVISION and torch.cuda.is_available()),
    reason="RESIZING ON A GPU IS NOT TESTED HERE: it needs a GPU and torchvision",
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
QUARTER_TURN = Image.Exif()
QUARTER_TURN[0x0112] = 6
MakeConfig = Callable[..., PipelineConfig]


def noise(height: int, width: int, channels: int, high: int = 256, dtype: Any = np.uint8) -> Any:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(height + width + channels).integers(0, high, shape).astype(dtype)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def rgb(height: int, width: int) -> Image.Image:
    return Image.fromarray(noise(height, width, 3))


SAMPLES: dict[str, Callable[[], bytes]] = {
    "to be reduced": lambda: encode(rgb(300, 410), "JPEG"),
    "to be enlarged": lambda: encode(rgb(20, 33)),
    "as large as it is to be": lambda: encode(rgb(64, 96)),
    "sides that could be channels": lambda: encode(rgb(3, 4)),
    "one pixel wide": lambda: encode(rgb(9, 1)),
    "grey": lambda: encode(Image.fromarray(noise(48, 80, 1))),
    "grey, transparent colour": lambda: encode(Image.fromarray(noise(48, 80, 1, 8)), transparency=3),
    "RGB, transparent colour": lambda: encode(Image.fromarray(noise(48, 80, 3, 2)), transparency=(1, 1, 1)),
    "palette, transparent colour": lambda: encode(rgb(48, 80).quantize(16), transparency=3),
    "palette, alpha table": lambda: encode(rgb(48, 80).quantize(16), transparency=bytes(range(0, 256, 16))),
    "RGBA": lambda: encode(Image.fromarray(noise(48, 80, 4))),
    "LA": lambda: encode(Image.fromarray(noise(48, 80, 2), "LA")),
    "16 bit": lambda: encode(Image.fromarray(noise(48, 80, 1, 65536, np.uint16))),
    "CMYK": lambda: encode(Image.fromarray(noise(48, 80, 4), "CMYK"), "JPEG"),
    "turned": lambda: encode(rgb(48, 80), "JPEG", exif=QUARTER_TURN),
}


def decode_sample(name: str) -> Image.Image:
    return decode(SAMPLES[name](), where=name, max_image_pixels=10**9)


def stock_sample(name: str) -> Image.Image:
    image = Image.open(BytesIO(SAMPLES[name]()))
    if isinstance(image.info.get("transparency"), bytes):
        del image.info["transparency"]  # Pillow warns about an alpha table; that is no difference in the numbers
    return load_image(image)


def processor_of(checkpoint: Path, **cache: Any) -> ImageProcessor:
    return ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(checkpoint)), CacheConfig(**cache))


def handing_over(checkpoint: Path) -> ImageProcessor:
    """One that leaves resizing to a GPU, also where torchvision is not installed: decoding is Pillow's either way."""
    backend = "torchvision" if HAS_TORCHVISION else "pil"
    return ImageProcessor(AutoImageProcessor.from_pretrained(checkpoint, backend=backend), "cuda")


def refs(files: list[Path]) -> list[tuple[str, ImageRef]]:
    return [(sha256(file.read_bytes()).hexdigest(), ImageRef(file.name, file)) for file in files]


@pytest.mark.skipif(HAS_TORCHVISION, reason="torchvision is installed")
@pytest.mark.parametrize("backend", ["auto", "torchvision"])
def test_it_needs_torchvision(tiny: Path, backend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        processor_of(tiny, image_processor_device="cuda", image_processor_backend=backend)
    assert str(caught.value).startswith(
        f"cache.image_processor_device: cuda, cache.image_processor_backend: {backend}: torchvision is not installed\n"
    )
    assert "or set cache.image_processor_device: cpu" in str(caught.value)


def test_pil_has_no_gpu(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"device: cuda, cache\.image_processor_backend: pil: PIL cannot resize"):
        processor_of(tiny, image_processor_device="cuda", image_processor_backend="pil")


def test_caches_resized_on_the_cpu_keep_their_fingerprint(tiny: Path, make_config: MakeConfig) -> None:
    config = make_config({"train": "none.jsonl"}, cache={"image_processor_device": "cpu"})
    fields = expected_fingerprint(config.model, config.cache).fields
    assert not [name for name in fields if "device" in name]
    on_cpu = ImageProcessor(AutoImageProcessor.from_pretrained(tiny, backend="pil")).settings
    on_gpu = ImageProcessor(AutoImageProcessor.from_pretrained(tiny, backend="pil"), "cuda").settings
    assert on_gpu == {**on_cpu, "device": "cuda"}


@pytest.mark.parametrize("any_backend", [True, False])
def test_a_cache_resized_elsewhere_is_another_one(cached: Any, any_backend: bool) -> None:
    builder, config = cached
    on_gpu = Fingerprint(builder.fingerprint.fields | {"processor.device": "cuda"})
    with pytest.raises(CacheError, match=r"processor\.device: 'cpu' in the cache, 'cuda' asked for") as caught:
        find_cache(config.cache_dir, on_gpu, any_backend=any_backend)
    assert str(caught.value).count("in the cache") == 1
    assert on_gpu.differences(builder.fingerprint) == ["processor.device: 'cuda' in the cache, 'cpu' asked for"]
    assert on_gpu.differences(on_gpu) == builder.fingerprint.differences(builder.fingerprint) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_hand_over_the_decoded_image(tiny: Path, tmp_path: Path, workers: int) -> None:
    files = draw_images(tmp_path, 3)
    processor = handing_over(tiny)
    found = list(load_pixels(refs(files), processor, CacheConfig(num_workers=workers)))
    for pixels, file in zip(found, files, strict=True):
        assert pixels.error is None
        with Image.open(file) as image:
            assert pixels.content.dtype == torch.uint8
            assert np.array_equal(pixels.content.permute(1, 2, 0).numpy(), np.asarray(image))
            grid = processor.grid_of(image.height, image.width)
        assert pixels.content.is_contiguous()
        assert tuple(pixels.image_grid_thw.tolist()) == grid
        assert pixels.image_grid_thw.dtype == torch.int64
        assert pixels.num_patches == grid[1] * grid[2], "batches are counted in patches of the resized image"


def test_an_impossible_shape_is_found_by_the_worker(tiny: Path, tmp_path: Path) -> None:
    files = [tmp_path / "long.png", tmp_path / "cut.png"]
    rgb(1, 201).save(files[0])
    files[1].write_bytes(encode(rgb(48, 80))[:200])
    long, cut = load_pixels(refs(files), handing_over(tiny), CacheConfig(num_workers=0))
    assert long.error is not None
    assert "201 x 1 (width x height)" in str(long.error)
    assert long.error.where == "long.png"
    assert cut.error is not None
    assert long.num_patches == cut.num_patches == 0


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_handed_over_is_what_stock_starts_from(tiny: Path, name: str) -> None:
    pixels, grid = decoded(handing_over(tiny), decode_sample(name), where=name)
    expected = convert_to_rgb(stock_sample(name), return_numpy=True)
    assert np.array_equal(pixels.permute(1, 2, 0).numpy(), expected)
    assert (pixels.dtype, pixels.shape[0], grid.shape) == (torch.uint8, 3, (3,))


def test_a_transparent_colour_is_painted_white(tiny: Path) -> None:
    # Guards the samples above: if stock no longer did so, equality alone would not say it.
    black = decode(encode(Image.new("RGB", (64, 64)), transparency=(0, 0, 0)), where="black", max_image_pixels=10**9)
    assert decoded(handing_over(tiny), black, where="black")[0].eq(255).all()


def test_without_a_gpu_nothing_is_cached(tmp_path: Path, make_config: MakeConfig, tiny: Path) -> None:
    rows = write_rows(tmp_path / "train.jsonl", draw_images(tmp_path / "images", 1))
    builder = builder_of(make_config({"train": str(rows)}, cache={"device": "cpu"}))
    builder.processor = handing_over(tiny)
    with pytest.raises(ConfigError, match=r"device: cuda: images are to be resized on a GPU, .* runs on cpu\n"):
        builder.run("train", SILENT)


@NO_GPU
def test_without_a_gpu_no_image_is_processed(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache\.image_processor_device: cuda: images are to be resized on a GPU"):
        handing_over(tiny)(rgb(64, 64), where="predict")


@NEEDS_TORCHVISION
@pytest.mark.parametrize("device", [CPU, pytest.param(GPU, marks=NEEDS_GPU)], ids=str)
@pytest.mark.parametrize(
    "changes", [{}, {"do_normalize": False}, {"do_rescale": False, "do_normalize": False}, {"do_convert_rgb": False}]
)
def test_both_halves_equal_the_stock_processor_bit_for_bit(
    tiny: Path, device: torch.device, changes: dict[str, Any]
) -> None:
    processor = processor_of(tiny, image_processor_backend="torchvision", max_pixels=128 * 128)
    stock = AutoImageProcessor.from_pretrained(tiny, backend="torchvision", size=dict(processor._processor.size))
    for setting, value in changes.items():
        setattr(processor._processor, setting, value)
        setattr(stock, setting, value)
    for name in SAMPLES:
        expected = stock(images=stock_sample(name), device=str(device), return_tensors="pt")
        pixels, grid = decoded(processor, decode_sample(name), where=name)
        found = pixel_values(processor, pixels, device)
        assert found.device.type == device.type
        assert found.dtype == expected["pixel_values"].dtype
        assert torch.equal(found, expected["pixel_values"]), name
        assert torch.equal(grid, expected["image_grid_thw"][0].cpu()), name


@NEEDS_GPU
def test_predict_is_stock_on_the_gpu(tiny: Path) -> None:
    image = rgb(300, 410)
    found, grid = processor_of(tiny, image_processor_device="cuda")(image, where="predict")
    stock = AutoImageProcessor.from_pretrained(tiny, backend="torchvision")
    expected = stock(images=image, device="cuda", return_tensors="pt")
    assert torch.equal(found, expected["pixel_values"])
    assert torch.equal(grid.cpu(), expected["image_grid_thw"][0].cpu())


@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_does_not_wait_for_the_gpu(tiny: Path, tmp_path: Path) -> None:
    files = draw_images(tmp_path, 4)
    processor = processor_of(tiny, image_processor_device="cuda", max_pixels=64 * 64)
    loaded = list(load_pixels(refs(files), processor, CacheConfig(num_workers=0)))
    assert all(pixels.content.is_pinned() for pixels in loaded)
    values = values_on(GPU, refs(files), processor)
    values(loaded[0])  # sends mean and standard deviation, once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pixels in loaded:
            values(pixels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@NEEDS_GPU
def test_more_than_a_gpu_reduces_in_one_step(tiny: Path) -> None:
    processor = processor_of(tiny, image_processor_device="cuda", min_pixels=32 * 32, max_pixels=32 * 32)
    with pytest.raises(DataError, match=r"b\.png: the image is 9000 x 9000 .* a GPU cannot reduce it so far"):
        pixel_values(processor, torch.zeros((3, 9000, 9000), dtype=torch.uint8), GPU, where="b.png")


@pytest.fixture
def on_gpu(tmp_path: Path, make_config: MakeConfig) -> tuple[CacheBuilder, PipelineConfig]:
    """Large and small images, resized on the GPU and cached."""
    files = draw_images(tmp_path / "images", 3)
    for number, image in enumerate([rgb(300, 410), rgb(20, 33)]):
        image.save(tmp_path / "images" / f"large-{number}.png")
        files.append(tmp_path / "images" / f"large-{number}.png")
    config = make_config(
        {"train": str(write_rows(tmp_path / "train.jsonl", files))},
        cache={"image_processor_device": "cuda", "num_workers": 2},
    )
    builder = builder_of(config)
    builder.run("train", SILENT)
    return builder, config


@NEEDS_GPU
def test_the_cache_holds_what_the_tower_makes_of_stock_pixels(on_gpu: Any, tmp_path: Path, tiny: Path) -> None:
    builder, config = on_gpu
    cache = FeatureCache(builder.folder)
    tower = VisionTower.load(config.model, config.cache)
    size = dict(builder.processor._processor.size)
    stock = AutoImageProcessor.from_pretrained(tiny, backend="torchvision", size=size)
    for key, ref in refs(sorted((tmp_path / "images").iterdir())):
        assert ref.file is not None
        made = stock(images=load_image(str(ref.file)), device="cuda", return_tensors="pt")
        (expected,) = tower.encode([made["pixel_values"]], [made["image_grid_thw"][0].cpu()])
        found = cache.read(key)
        assert torch.equal(found.image_embeds, expected.image_embeds.cpu())
        assert torch.equal(found.deepstack_features, expected.deepstack_features.cpu())


@NEEDS_GPU
def test_a_configuration_that_resizes_on_the_cpu_does_not_read_it(on_gpu: Any) -> None:
    builder, config = on_gpu
    on_cpu = config.cache.model_copy(update={"image_processor_device": "cpu"})
    with pytest.raises(CacheError, match=r"processor\.device: 'cuda' in the cache, 'cpu' asked for"):
        find_cache(config.cache_dir, expected_fingerprint(config.model, on_cpu), any_backend=True)
    assert builder.run("train", SILENT).encoded_images == 0
