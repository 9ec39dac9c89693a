"""Decoding and preprocessing against the stock path of transformers, bit for bit."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError, DataError
from cache.preprocess import ImageProcessor, decode, header_size

MIN_PIXELS, MAX_PIXELS = 65536, 16777216
LIMIT = 200_000_000
ORIENTATION = 0x0112
BACKENDS = ["pil", "torchvision"] if is_torchvision_available() else ["pil"]


def save_processor(folder: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "patch_size": 16,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    Qwen2VLImageProcessorPil(**(values | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_processor(tmp_path_factory.mktemp("checkpoint"))


def load(folder: Path, **cache: Any) -> ImageProcessor:
    return ImageProcessor.from_checkpoint(ModelConfig(name_or_path=str(folder)), CacheConfig(**cache))


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[ImageProcessor, Any]:
    """Ours and the stock processor, of one backend."""
    stock = AutoImageProcessor.from_pretrained(checkpoint, backend=request.param)
    return load(checkpoint, image_processor_backend=request.param), stock


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> ImageProcessor:
    return load(checkpoint, image_processor_backend="pil")


def noise(height: int, width: int, channels: int = 3, high: int = 256, dtype: type = np.uint8) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(height * 1000 + width + channels).integers(0, high, shape).astype(dtype)


def rgb(height: int = 48, width: int = 80) -> Image.Image:
    return Image.fromarray(noise(height, width))


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def palette_with_alpha_table() -> bytes:
    return encode(rgb().quantize(16), "PNG", transparency=bytes(range(0, 256, 16)))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with_late(*late: bytes, n_frames: int = 1) -> bytes:
    images = frames(n_frames)
    data = encode(images[0], "PNG", save_all=n_frames > 1, append_images=images[1:])
    end = data.rindex(b"IEND") - 4
    return data[:end] + b"".join(late) + data[end:]


def xmp_chunk(orientation: int) -> bytes:
    return chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="%d"/>' % orientation)


def frames(n: int = 3) -> list[Image.Image]:
    return [Image.fromarray(noise(40 + i, 60)).resize((60, 40)) for i in range(n)]


SAMPLES: dict[str, Any] = {
    "plain PNG": lambda: encode(rgb(), "PNG"),
    "plain JPEG": lambda: encode(rgb(70, 90), "JPEG"),
    "progressive JPEG": lambda: encode(rgb(70, 90), "JPEG", progressive=True),
    "grey JPEG": lambda: encode(rgb().convert("L"), "JPEG"),
    "CMYK JPEG": lambda: encode(Image.fromarray(noise(48, 80, 4), "CMYK"), "JPEG"),
    "CMYK TIFF": lambda: encode(Image.fromarray(noise(48, 80, 4), "CMYK"), "TIFF"),
    "palette PNG": lambda: encode(rgb().quantize(16), "PNG"),
    "palette PNG, one transparent colour": lambda: encode(rgb().quantize(16), "PNG", transparency=3),
    "palette PNG, alpha table": palette_with_alpha_table,
    "grey PNG, transparent colour": lambda: encode(Image.fromarray(noise(48, 80, 1, 8)), "PNG", transparency=3),
    "RGB PNG, transparent colour": lambda: encode(Image.fromarray(noise(48, 80, 3, 2)), "PNG", transparency=(1, 1, 1)),
    "I;16 PNG": lambda: encode(Image.fromarray(noise(48, 80, 1, 65536, np.uint16)), "PNG"),
    "I;16 TIFF": lambda: encode(Image.fromarray(noise(48, 80, 1, 65536, np.uint16)), "TIFF"),
    "F TIFF": lambda: encode(Image.fromarray(noise(48, 80, 1, 300, np.float32)), "TIFF"),
    "LA PNG": lambda: encode(Image.fromarray(noise(48, 80, 2), "LA"), "PNG"),
    "RGBA PNG": lambda: encode(Image.fromarray(noise(48, 80, 4)), "PNG"),
    "RGBA WebP": lambda: encode(Image.fromarray(noise(48, 80, 4)), "WEBP", lossless=True),
    "1-bit PNG": lambda: encode(Image.fromarray(noise(48, 80, 1) > 128), "PNG"),
    "1-bit TIFF": lambda: encode(Image.fromarray(noise(48, 80, 1) > 128), "TIFF", compression="group4"),
    "MPO": lambda: encode(frames()[0], "MPO", save_all=True, append_images=frames()[1:]),
    "animated GIF": lambda: encode(frames()[0], "GIF", save_all=True, append_images=frames()[1:]),
    "animated WebP": lambda: encode(frames()[0], "WEBP", save_all=True, append_images=frames()[1:]),
    "animated PNG": lambda: encode(frames()[0], "PNG", save_all=True, append_images=frames()[1:]),
    "transparent GIF": lambda: encode(rgb().quantize(8), "GIF", transparency=2),
    "BMP": lambda: encode(rgb(), "BMP"),
    "PPM": lambda: encode(rgb(), "PPM"),
    "JPEG 2000": lambda: encode(rgb(), "JPEG2000"),
    "1 x 1": lambda: encode(rgb(1, 1), "PNG"),
    "1 x 3": lambda: encode(rgb(1, 3), "PNG"),
    "1:200 tall": lambda: encode(rgb(800, 4), "PNG"),
    "200:1 wide": lambda: encode(rgb(3, 600), "PNG"),
    "eXIf behind the pixels": lambda: png_with_late(chunk(b"eXIf", exif(6).tobytes()[6:])),
    "eXIf behind an animation": lambda: png_with_late(chunk(b"eXIf", exif(6).tobytes()[6:]), n_frames=2),
    "XMP behind the pixels": lambda: png_with_late(xmp_chunk(8)),
    "late XMP overruled by late eXIf": lambda: png_with_late(xmp_chunk(8), chunk(b"eXIf", exif(3).tobytes()[6:])),
    **{
        f"{kind} EXIF orientation {n}": lambda kind=kind, n=n: encode(rgb(), kind, exif=exif(n))
        for kind, n in [("JPEG", n) for n in range(1, 9)] + [("PNG", 6), ("TIFF", 6), ("TIFF", 3), ("WEBP", 8)]
    },
}


def stock_image(path: Path) -> Image.Image:
    # Opened as load_image(str(path)) does, which leaves closing to the garbage collector.
    with warnings.catch_warnings(), Image.open(path) as image:
        # Pillow warns about an alpha table in a palette; that is no difference in the numbers.
        warnings.filterwarnings("ignore", "Palette images with Transparency")
        return load_image(image)


@pytest.mark.parametrize("name", SAMPLES)
def test_equals_stock(name: str, pair: tuple[ImageProcessor, Any], tmp_path: Path) -> None:
    ours, stock = pair
    data = SAMPLES[name]()
    path = tmp_path / "image.png"  # of JPEGs, too: the name must not matter
    path.write_bytes(data)
    expected_image = stock_image(path)
    expected = stock(images=expected_image, return_tensors="pt")

    image = decode(data, where=name, max_image_pixels=LIMIT)
    pixel_values, grid = ours(image, where=name)

    assert (image.mode, image.size) == ("RGB", expected_image.size)
    assert image.info.get("transparency") == expected_image.info.get("transparency")
    assert torch.equal(pixel_values, expected["pixel_values"])
    assert (pixel_values.dtype, pixel_values.shape) == (torch.float32, (int(grid.prod()), 3 * 2 * 16 * 16))
    assert torch.equal(grid, expected["image_grid_thw"][0])
    assert grid.dtype == torch.int64
    size = header_size(data, where=name)
    assert size == (expected_image.height, expected_image.width)
    assert ours.grid_of(*size) == tuple(grid.tolist())
    assert ours.num_tokens(grid) == ours.num_tokens(tuple(grid.tolist())) == int(grid.prod()) // 4


def test_a_transparent_colour_becomes_white_and_alpha_is_dropped(processor: ImageProcessor) -> None:
    # Guards the samples above: if stock changed one of the two, equality alone would not say so.
    black = Image.new("RGB", (256, 256))
    keyed = decode(encode(black, "PNG", transparency=(0, 0, 0)), where="a", max_image_pixels=LIMIT)
    alpha = decode(encode(Image.new("RGBA", (256, 256)), "PNG"), where="b", max_image_pixels=LIMIT)
    assert processor(keyed, where="a")[0].unique().tolist() == [1.0]
    assert processor(alpha, where="b")[0].unique().tolist() == [-1.0]


def test_a_one_pixel_image_is_enlarged_to_min_pixels(processor: ImageProcessor) -> None:
    assert processor.grid_of(1, 1) == (1, 16, 16)
    assert MIN_PIXELS == (16 * 16) ** 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_exchanges_sides(orientation: int) -> None:
    data = encode(rgb(48, 80), "JPEG", exif=exif(orientation))
    assert header_size(data, where="x") == ((80, 48) if orientation >= 5 else (48, 80))


@pytest.mark.skipif("AVIF" not in Image.registered_extensions().values(), reason="Pillow without AVIF")
def test_avif(tmp_path: Path) -> None:
    data = encode(rgb(), "AVIF", exif=exif(6))
    (tmp_path / "a.avif").write_bytes(data)
    expected = stock_image(tmp_path / "a.avif")
    assert np.array_equal(decode(data, where="a", max_image_pixels=LIMIT), expected)
    assert header_size(data, where="a") == (expected.height, expected.width) == (80, 48)


def test_a_tiff_rotated_by_xmp_alone(tmp_path: Path) -> None:
    data = encode(rgb(), "TIFF", tiffinfo={700: b'<x tiff:Orientation="6"/>'})
    (tmp_path / "a.tif").write_bytes(data)
    expected = stock_image(tmp_path / "a.tif")
    assert header_size(data, where="a") == (expected.height, expected.width) == (80, 48)


# --- what cannot be used


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"^some\.png: the image is empty \(0 bytes\)\n  What to do: replace the file"),
        (b"hello, world", r"^some\.png: not an image in a format that can be read \(12 bytes, .*b'hello, w'\)\n.*JPEG"),
        (b"\0" * 100, "not an image in a format"),
        (b"P", r"not an image in a format that can be read \(1 bytes"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not an image in a format"),
        (b"\x89PNG\r\n\x1a\n", r"^some\.png: the header of the PNG image cannot be read"),
        (b"\xff\xd8\xff\xe0", r"^some\.png: the header of the JPEG image cannot be read"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "the header of the WEBP image cannot be read"),
        (b"II*\0\x08\0\0\0", "the header of the TIFF image cannot be read"),
        (b"P6\n0 0\n255\n", "the header of the PPM image cannot be read"),
    ],
)
def test_not_an_image(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        decode(data, where="some.png", max_image_pixels=LIMIT)
    with pytest.raises(DataError, match=message):
        header_size(data, where="some.png")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000"])
def test_truncated_as_stock(kind: str, tmp_path: Path) -> None:
    data = encode(rgb(64, 64), kind)
    path = tmp_path / "image"
    refused = 0
    for cut in (10, 20, 60, len(data) // 4, len(data) // 2, len(data) - 200, len(data) - 13, len(data) - 1):
        path.write_bytes(data[:cut])
        try:
            expected: Image.Image | None = stock_image(path)
        except Exception:
            expected = None
        if expected is None:
            refused += 1
            with pytest.raises(
                DataError, match=rf"^t\.img: (the (header of the )?{kind} image cannot be|not an image)"
            ):
                decode(data[:cut], where="t.img", max_image_pixels=LIMIT)
        else:
            assert np.array_equal(decode(data[:cut], where="t.img", max_image_pixels=LIMIT), expected)
    assert refused >= 3


def test_damaged_exif_is_passed_over_as_stock() -> None:
    data = encode(rgb(48, 80), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01")
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        assert np.array_equal(decode(data, where="x", max_image_pixels=LIMIT), load_image(Image.open(BytesIO(data))))
    with pytest.warns(UserWarning, match="Corrupt EXIF data"):
        assert header_size(data, where="x") == (48, 80)


def test_exif_that_stock_cannot_read_either() -> None:
    info = PngInfo()
    info.add_text("Raw profile type exif", "\nexif\n4\nnot hexadecimal")
    data = encode(rgb(), "PNG", pnginfo=info)
    with pytest.raises(ValueError, match="non-hexadecimal"):
        load_image(Image.open(BytesIO(data)))
    with pytest.raises(DataError, match=r"^x: the PNG image cannot be decoded: non-hexadecimal"):
        decode(data, where="x", max_image_pixels=LIMIT)
    with pytest.raises(DataError, match=r"^x: the EXIF data of the PNG image cannot be read: non-hexadecimal"):
        header_size(data, where="x")


def bomb(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_decompression_bomb_takes_no_memory() -> None:
    decode(encode(rgb(), "PNG"), where="warm-up", max_image_pixels=LIMIT)
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=r"^b\.png: .*60000 x 60000 .*3600000000 pixels, .*max_image_pixels = 200000000"
        ):
            decode(bomb(60000, 60000), where="b.png", max_image_pixels=LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_before_its_pixels_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(mode: str, size: tuple[int, int], *rest: Any) -> None:
        raise AssertionError(f"memory for {size} was taken")

    data = bomb(60000, 60000)
    monkeypatch.setattr(Image.core, "new", refuse)
    with pytest.raises(DataError, match="max_image_pixels"):
        decode(data, where="b", max_image_pixels=LIMIT)
    assert header_size(data, where="b") == (60000, 60000)


def test_the_pixel_limit_is_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # 48 * 80 pixels are far more than twice Pillow's limit here, so Image.open would raise.
    data = encode(rgb(48, 80), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(data, where="x", max_image_pixels=48 * 80).size == (80, 48)
    with pytest.raises(DataError, match=r"80 x 48 .*3840 pixels, more than cache.max_image_pixels = 3839"):
        decode(data, where="x", max_image_pixels=48 * 80 - 1)
    assert Image.MAX_IMAGE_PIXELS == 100


def test_pillows_own_bomb_error_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(rgb(48, 80), "WEBP")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"the header of the WEBP image cannot be read: .*decompression bomb"):
        decode(data, where="x", max_image_pixels=LIMIT)


def test_out_of_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError

    data = encode(rgb(), "PNG")
    monkeypatch.setattr(Image.core, "new", exhausted)
    with pytest.raises(MemoryError):
        decode(data, where="x", max_image_pixels=LIMIT)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "PPM", "JPEG2000"])
def test_header_from_leading_bytes(kind: str) -> None:
    data = encode(rgb(300, 200), kind, **({"exif": exif(6)} if kind in {"PNG", "JPEG"} else {}))
    assert len(data) > 4096
    assert header_size(data[:2048], where="x") == ((200, 300) if kind in {"PNG", "JPEG"} else (300, 200))


def test_header_size_does_not_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("decoded")

    files = [encode(rgb(), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert {header_size(data, where="x") for data in files} == {(48, 80)}


def test_text_in_a_png_does_not_disturb_the_header() -> None:
    info = PngInfo()
    info.add_text("Comment", "x" * 1000)
    assert header_size(encode(rgb(), "PNG", pnginfo=info), where="x") == (48, 80)


# --- the grid


@given(height=st.integers(1, 420), width=st.integers(1, 420))
@settings(max_examples=60, deadline=None)
def test_grid_of_is_the_real_grid(height: int, width: int) -> None:
    stock = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 256, "longest_edge": 4096})
    ours = ImageProcessor(stock)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(DataError, match="200 times"):
            ours.grid_of(height, width)
        return
    real = stock(images=Image.new("RGB", (width, height)), return_tensors="pt")["image_grid_thw"][0]
    assert ours.grid_of(height, width) == tuple(real.tolist())


@given(height=st.integers(1, 30_000), width=st.integers(1, 30_000))
@settings(max_examples=300, deadline=None)
def test_grid_of_has_stocks_number_of_patches(processor: ImageProcessor, height: int, width: int) -> None:
    stock = processor._processor
    try:
        expected = stock.get_number_of_image_patches(height, width)
    except ValueError:
        with pytest.raises(DataError, match="200 times"):
            processor.grid_of(height, width)
        return
    t, h, w = processor.grid_of(height, width)
    assert t * h * w == expected
    assert processor.num_tokens((t, h, w)) == expected // 4


def test_too_long_an_image(processor: ImageProcessor) -> None:
    message = r"^thin\.png: the image is 300 x 1 \(width x height\) pixels; .* 200 times the other\n  What to do: crop"
    with pytest.raises(DataError, match=message):
        processor.grid_of(1, 300, where="thin.png")
    with pytest.raises(DataError, match=message):
        processor(Image.new("RGB", (300, 1)), where="thin.png")
    with pytest.raises(DataError, match=r"^the image is 0 x 5"):
        processor.grid_of(5, 0)


# --- the checkpoint


def test_defaults_are_the_checkpoints(checkpoint: Path) -> None:
    ours = load(checkpoint)
    assert (ours.min_pixels, ours.max_pixels) == (MIN_PIXELS, MAX_PIXELS)
    assert ours.grid_of(4096, 4096) == (1, 256, 256)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "limits", [{"max_pixels": 65536}, {"min_pixels": 262144}, {"min_pixels": 1024, "max_pixels": 4096}]
)
def test_limits_are_honoured(checkpoint: Path, backend: str, limits: dict[str, int]) -> None:
    size = {
        "shortest_edge": limits.get("min_pixels", MIN_PIXELS),
        "longest_edge": limits.get("max_pixels", MAX_PIXELS),
    }
    image = rgb(290, 310)
    expected = AutoImageProcessor.from_pretrained(checkpoint, backend=backend, size=size)(image, return_tensors="pt")
    ours = load(checkpoint, image_processor_backend=backend, **limits)
    pixel_values, grid = ours(image, where="x")
    assert torch.equal(pixel_values, expected["pixel_values"])
    assert ours.grid_of(290, 310) == tuple(grid.tolist()) == tuple(expected["image_grid_thw"][0].tolist())
    pixels = int(grid.prod()) * 16 * 16
    assert pixels >= size["shortest_edge"] if "max_pixels" not in limits else pixels <= size["longest_edge"]
    assert tuple(grid.tolist()) != load(checkpoint).grid_of(290, 310)


def test_limits_in_the_wrong_order(checkpoint: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"min_pixels 65536 is larger than max_pixels 4096 \(the checkpoint's own .*65536"
    ):
        load(checkpoint, max_pixels=4096)


def test_settings_are_stable(checkpoint: Path) -> None:
    first, second = load(checkpoint).settings, load(checkpoint).settings
    assert json.dumps(first) == json.dumps(second)
    assert json.loads(json.dumps(first)) == first
    assert list(first) == sorted(first)
    assert first == {
        "backend": BACKENDS[-1],
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "max_pixels": MAX_PIXELS,
        "merge_size": 2,
        "min_pixels": MIN_PIXELS,
        "patch_size": 16,
        "resample": "bicubic",
        "rescale_factor": 1 / 255,
        "temporal_patch_size": 2,
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"patch_size": 14}, "patch_size"),
        ({"merge_size": 1}, "merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"image_mean": [0.4] * 3}, "image_mean"),
        ({"image_std": 0.25}, "image_std"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 0.5}, "rescale_factor"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"size": {"shortest_edge": MIN_PIXELS, "longest_edge": 1 << 20}}, "max_pixels"),
    ],
)
def test_settings_show_what_differs(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    one, other = load(checkpoint).settings, load(save_processor(tmp_path, **changes)).settings
    assert [name for name in one if one[name] != other[name]] == [key]


def test_settings_of_an_override_are_those_of_such_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    other = save_processor(tmp_path, size={"shortest_edge": MIN_PIXELS, "longest_edge": 1 << 20})
    assert load(checkpoint, max_pixels=1 << 20).settings == load(other).settings != load(checkpoint).settings


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_every_name_of_the_processor_is_known(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    values = json.loads((checkpoint / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values | {"image_processor_type": kind}))
    assert load(tmp_path).settings == load(checkpoint).settings


def test_pickling(pair: tuple[ImageProcessor, Any]) -> None:
    ours = pair[0]
    copy = pickle.loads(pickle.dumps(ours))
    image = rgb(300, 280)
    assert copy.settings == ours.settings
    for one, other in zip(copy(image, where="x"), ours(image, where="x"), strict=True):
        assert torch.equal(one, other)


def test_no_processor_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no image processor can be loaded: .*\n  What to do: .*preprocessor_config"):
        load(tmp_path)


def test_broken_processor_settings(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="no image processor can be loaded"):
        load(tmp_path)


def test_code_in_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    values = {"image_processor_type": "Mine", "auto_map": {"AutoImageProcessor": "mine.Mine"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    (tmp_path / "mine.py").write_text("raise SystemExit('code of the checkpoint was run')")
    with pytest.raises(ConfigError, match="no image processor can be loaded"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "Glm4vImageProcessor"])
def test_another_kind_of_processor(tmp_path: Path, kind: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind}))
    with pytest.raises(
        ConfigError, match=rf"is {kind}(Pil)?, not a Qwen2VLImageProcessor\n  What to do: name a Qwen3-VL"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "has do_resize: false"),
        ({"size": {"height": 64, "width": 64}}, r"has size \{.*64.*\}, without shortest_edge and longest_edge"),
    ],
)
def test_processor_without_the_resize_rule(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(save_processor(tmp_path, **changes))


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_torchvision_is_not_installed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"torchvision is not installed\n  What to do: pip install torchvision"):
        load(checkpoint, image_processor_backend="torchvision")
    assert load(checkpoint, image_processor_backend="auto").backend == "pil"
    # transformers then falls back to PIL with a log line; the wish must not be lost on the way.
    monkeypatch.setattr("transformers.utils.is_torchvision_available", lambda: True)
    with pytest.raises(ConfigError, match="has the backend 'pil', not 'torchvision'"):
        load(checkpoint, image_processor_backend="torchvision")
