"""From encoded bytes to the vision tower's input, by the checkpoint's own image processor.

The numbers are those of the stock path, `processor(images=transformers.image_utils.load_image(file))`, bit for bit.
What is added here is a clear error for everything that cannot be used, and limits that hold before memory is taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from PIL import ExifTags, Image

from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError, DataError
from cache.image_formats import as_data_error, open_image
from cache.image_processor_choice import any_gpu, available_backend

if TYPE_CHECKING:
    import torch

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRANSPOSING = (5, 6, 7, 8)  # EXIF orientations that exchange height and width
_QWEN2_VL = {"Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil"}


def decode(data: bytes, *, where: str, max_image_pixels: int) -> Image.Image:
    """Decode an image as `transformers.image_utils.load_image` does.

    Args:
        data: the whole encoded file. Its content alone decides the format.
        where: names the image in errors.
        max_image_pixels: an image whose header claims more (height * width) is refused before it is decoded.

    Returns:
        Upright RGB image of 8 bits a channel; the first frame of an animation. An alpha channel is dropped, as stock
        does. A single transparent colour stays in `info["transparency"]`: the stock processor paints it white.

    Raises:
        DataError: no bytes, not an image in a known format, truncated or damaged, too many pixels.
    """
    from transformers.image_utils import load_image

    image = open_image(data, where)
    width, height = image.size
    if width * height > max_image_pixels:
        raise DataError(
            f"the image is {width} x {height} (width x height), {width * height} pixels, more than "
            f"cache.max_image_pixels = {max_image_pixels}",
            where=where,
            do="reduce the image; if it is genuine and memory allows, raise cache.max_image_pixels",
        )
    with as_data_error(f"the {image.format} image cannot be decoded", where):
        image.load()
        # Pillow ignores this table when it converts to RGB, but warns about it for each image.
        if isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]
        return cast(Image.Image, load_image(image))


def header_size(data: bytes, *, where: str) -> tuple[int, int]:
    """Read the size that `decode` would give, from the header alone.

    Args:
        data: the whole file, or its leading bytes: for JPEG up to the scan, for GIF, BMP, PPM and JPEG 2000 the header.
            For PNG too, but an orientation behind the pixels is seen in the whole file only. WebP, AVIF and TIFF need
            the whole file.
        where: names the image in errors.

    Returns:
        (height, width) in pixels, upright: EXIF orientation is considered.

    Raises:
        DataError: no bytes, not an image in a known format, or the header is cut off or damaged.
    """
    image = open_image(_metadata_first(data), where)
    width, height = image.size
    with as_data_error(f"the EXIF data of the {image.format} image cannot be read", where):
        # Not image.getexif(): for PNG that one decodes the pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    # Pillow has already exchanged the sides of a TIFF by its own tag, but not by an orientation in its XMP.
    exchanged = getattr(image, "tag_v2", {}).get(ExifTags.Base.Orientation) in _TRANSPOSING
    return (width, height) if orientation in _TRANSPOSING and not exchanged else (height, width)


def _metadata_first(data: bytes) -> bytes:
    """Move a PNG's chunks behind the pixels before them, where the header's reader finds them without decoding."""
    if not data.startswith(_PNG_SIGNATURE):
        return data
    position, pixels = len(_PNG_SIGNATURE), 0
    late: list[bytes] = []
    while position + 8 <= len(data):
        end = position + 12 + int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if kind == b"IDAT":
            pixels = pixels or position
        elif pixels:
            # Pillow, too, reads no further than the second frame of an animation.
            if kind in {b"IEND", b"fcTL"} or end > len(data):
                break
            late.append(data[position:end])
        position = end
    return data[:pixels] + b"".join(late) + data[pixels : pixels + 8] if late else data


class ImageProcessor:
    """The checkpoint's own image processor, for one image at a time. Picklable, so that worker processes can have it.

    Attributes:
        backend: "pil" or "torchvision".
        device: "cpu", or "cuda" where images are resized on a GPU (see cache.gpu_resize).
        min_pixels, max_pixels: height * width to which smaller images are enlarged and larger ones reduced.
        patch_size, temporal_patch_size: extent of a patch in pixels and in frames (an image is repeated to fill them).
        merge_size: the tower merges merge_size x merge_size patches into one token.
    """

    def __init__(self, processor: Any, device: str = "cpu") -> None:
        """Wrap a loaded `Qwen2VLImageProcessor` (either backend); `from_checkpoint` checks that it is one."""
        self._processor = processor
        self.device = device
        self.backend: str = processor.backend
        self.min_pixels = int(processor.size["shortest_edge"])
        self.max_pixels = int(processor.size["longest_edge"])
        self.patch_size = int(processor.patch_size)
        self.temporal_patch_size = int(processor.temporal_patch_size)
        self.merge_size = int(processor.merge_size)

    @classmethod
    def from_checkpoint(cls, model: ModelConfig, cache: CacheConfig) -> ImageProcessor:
        """Load the processor of a checkpoint, a folder or a hub id; code in the checkpoint is never run.

        Args:
            model: `name_or_path` and `revision`.
            cache: `min_pixels` and `max_pixels` override the checkpoint's limits when given;
                `image_processor_backend` "auto" is torchvision where it is installed, else PIL. No GPU has to be
                there for `image_processor_device` "cuda" until an image is processed.

        Raises:
            ConfigError: no processor settings, another kind of processor, a missing backend, min_pixels > max_pixels,
                "cuda" without torchvision.
        """
        processor = _load(model, available_backend(cache.image_processor_backend, cache.image_processor_device))
        _override_size(processor, cache, model.name_or_path)
        return cls(processor, cache.image_processor_device)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, in JSON types, keys sorted. Made for a fingerprint."""
        own = self._processor
        names = ("backend", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size")
        flags = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values |= {name: bool(getattr(own, name)) for name in flags}
        values |= {
            "image_processor_type": type(own).__name__.removesuffix("Pil"),
            "image_mean": np.ravel(own.image_mean).tolist(),
            "image_std": np.ravel(own.image_std).tolist(),
            "resample": _resample_name(own.resample),
            "rescale_factor": float(own.rescale_factor),
        }
        if self.device != "cpu":  # left out otherwise: caches from before there was a choice keep their name
            values["device"] = self.device
        return dict(sorted(values.items()))

    def __eq__(self, other: object) -> bool:
        """Equal ones give equal numbers."""
        return isinstance(other, ImageProcessor) and self.settings == other.settings

    def __hash__(self) -> int:
        """Of the settings."""
        return hash(json.dumps(self.settings))

    def grid_of(self, height: int, width: int, *, where: str | None = None) -> tuple[int, int, int]:
        """Find an image's grid of patches from its size alone.

        Args:
            height, width: upright, in pixels; `where` names the image in errors.

        Returns:
            (t, h, w) in patches before merging, equal to the image_grid_thw of the processed image; t is 1.

        Raises:
            DataError: a side is below 1, or one side is more than 200 times the other.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor = self.patch_size * self.merge_size
        try:
            resized = smart_resize(height, width, factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        except (ValueError, ZeroDivisionError) as error:
            raise DataError(
                f"the image is {width} x {height} (width x height) pixels; the image processor needs both sides to be "
                "at least 1 and neither more than 200 times the other",
                where=where,
                do="crop or pad the image, or set data.on_bad_record: report to leave its records out",
            ) from error
        return 1, resized[0] // self.patch_size, resized[1] // self.patch_size

    def num_tokens(self, grid: Sequence[int] | torch.Tensor) -> int:
        """Count an image's tokens in the sequence: t * h * w / merge_size**2 for a (t, h, w) grid of patches."""
        t, h, w = map(int, grid)
        return t * h * w // self.merge_size**2

    def __call__(
        self, image: Image.Image | torch.Tensor, *, where: str | None, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Resize, normalize and cut one image into patches, by the stock processor.

        Args:
            image: as `decode` gives it, or as cache.gpu_resize.decoded; `where` names it in errors.
            settings: of the stock processor, in place of the checkpoint's, e.g. `do_resize=False`; `device` in place of
                this processor's own, e.g. `torch.device("cuda:1")`.

        Returns:
            pixel_values: (P, C * temporal_patch_size * patch_size**2) float32, P = t * h * w patches.
            image_grid_thw: (3,) int64, (t, h, w).

        Raises:
            DataError: one side is more than 200 times the other.
            ConfigError: it is to run on a GPU, and there is none.
        """
        height, width = (image.height, image.width) if isinstance(image, Image.Image) else image.shape[-2:]
        self.grid_of(height, width, where=where)
        if self.device != "cpu" and "device" not in settings:
            settings["device"] = any_gpu()
        batch = self._processor(images=[image], return_tensors="pt", **settings)
        return batch["pixel_values"], batch["image_grid_thw"][0]

    def to_tensor(self, image: Image.Image) -> torch.Tensor:
        """What the stock processor itself starts from: (3, H, W) uint8, a single transparent colour painted white."""
        import torch

        pixels = self._processor.process_image(image, do_convert_rgb=self._processor.do_convert_rgb)
        return torch.as_tensor(pixels).contiguous()


def _load(model: ModelConfig, backend: str) -> Any:
    from transformers import AutoImageProcessor

    advice = "name a Qwen3-VL checkpoint that has its preprocessor_config.json (model.name_or_path)"
    options = {"backend": backend, "revision": model.revision or "main"}
    try:
        processor = AutoImageProcessor.from_pretrained(model.name_or_path, trust_remote_code=False, **options)
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError(f"no image processor can be loaded: {error}", where=model.name_or_path, do=advice) from error
    # Others have a patch_size and a merge_size too, but another rule for the resized size.
    if type(processor).__name__ not in _QWEN2_VL:
        problem = f"is {type(processor).__name__}, not a Qwen2VLImageProcessor"
    # transformers falls back to another backend with no more than a log line.
    elif processor.backend != backend:
        problem = f"has the backend {processor.backend!r}, not {backend!r} (cache.image_processor_backend)"
    elif not processor.do_resize:
        problem = "has do_resize: false, so images would not fit the grid of patches"
    elif not (processor.size["shortest_edge"] and processor.size["longest_edge"]):
        problem = f"has size {dict(processor.size)}, without shortest_edge and longest_edge"
    else:
        return processor
    raise ConfigError(f"the checkpoint's image processor {problem}", where=model.name_or_path, do=advice)


def _override_size(processor: Any, cache: CacheConfig, where: str) -> None:
    from transformers.image_utils import SizeDict

    own = processor.size
    smallest = own["shortest_edge"] if cache.min_pixels is None else cache.min_pixels
    largest = own["longest_edge"] if cache.max_pixels is None else cache.max_pixels
    if smallest > largest:
        own_sizes = f"the checkpoint's own are {own['shortest_edge']} and {own['longest_edge']}"
        what = f"min_pixels {smallest} is larger than max_pixels {largest} ({own_sizes})"
        raise ConfigError(what, where=where, do="set both cache.min_pixels and cache.max_pixels")
    processor.size = SizeDict(shortest_edge=smallest, longest_edge=largest)


def _resample_name(value: Any) -> str:
    # By version and backend this is Pillow's enum, a bare number, or torchvision's enum, whose values are names.
    return Image.Resampling(value).name.lower() if isinstance(value, int) else str(value.value)
