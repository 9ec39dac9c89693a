"""Images resized on a GPU: a worker hands over the decoded image, and the stock processor does the rest over there.

The numbers are those of the stock processor called with `device="cuda"`, bit for bit. They differ in the last bits from
those of a CPU, where torchvision resizes in integers.
"""

from __future__ import annotations

import torch
from PIL import Image

from cache.errors import DataError, ResourceError
from cache.preprocess import ImageProcessor

_CPU_INSTEAD = "or set cache.image_processor_device: cpu"


def decoded(processor: ImageProcessor, image: Image.Image, *, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The half of the work that needs no GPU.

    Args:
        image: as `cache.preprocess.decode` gives it; `where` names it in errors.

    Returns:
        pixels: (3, H, W) uint8, not resized.
        image_grid_thw: (3,) int64, of the image once it is resized.

    Raises:
        DataError: one side is more than 200 times the other.
    """
    grid = processor.grid_of(image.height, image.width, where=where)
    return processor.to_tensor(image), torch.tensor(grid)


def pixel_values(
    processor: ImageProcessor, pixels: torch.Tensor, device: torch.device, *, where: str | None = None
) -> torch.Tensor:
    """Resize, normalize and cut an image into patches on a device.

    Args:
        pixels: as `decoded` gives them; pinned ones travel without the host waiting for them.
        where: names the image in errors.

    Returns:
        (P, C * temporal_patch_size * patch_size**2) float32, on the device.

    Raises:
        ResourceError: the device's memory does not suffice.
        DataError: the image would be made smaller than the GPU's resampling can.
    """
    size = f"{pixels.shape[-1]} x {pixels.shape[-2]} (width x height)"
    try:
        # It is RGB already, and what it looks like must not be guessed from sides of 1, 3 or 4 pixels.
        values, _ = processor(
            pixels.to(device, non_blocking=True),
            where=where,
            device=device,
            do_convert_rgb=False,
            input_data_format="channels_first",
        )
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"the GPU ran out of memory resizing an image of {size} pixels",
            where=where,
            do=f"reduce the image, lower cache.max_image_pixels to refuse such images, {_CPU_INSTEAD}",
        ) from error
    except RuntimeError as error:
        if "reduce the scale factor" not in str(error):
            raise
        raise DataError(
            f"the image is {size} pixels, and a GPU cannot reduce it so far in one step",
            where=where,
            do="reduce the image, take its records out of the data (on_bad_record looks only at what the CPU decodes), "
            f"raise cache.max_pixels, {_CPU_INSTEAD}",
        ) from error
    return values
