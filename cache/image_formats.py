"""Which image formats are read, told by the first bytes; a header is parsed, pixels are not decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

from PIL import Image, ImageFile

from cache.errors import DataError

# Pillow hands some formats to other programs (EPS to Ghostscript) and guesses others without a signature (TGA), so what
# may be opened is listed here. MPO is opened as JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
REPLACE = "replace the file by an intact image, or set data.on_bad_record: report to leave its records out"


def open_image(data: bytes, where: str) -> ImageFile.ImageFile:
    """Identify the format and read the header; pixels are not decoded.

    Raises:
        DataError: no bytes, not an image in a known format, or its header is damaged or cut off.
    """
    name, opener = require_format(data, len(data), where=where)
    with as_data_error(f"the header of the {name} image cannot be read", where):
        image: ImageFile.ImageFile = opener(BytesIO(data), "")
        return image


def require_format(head: bytes, num_bytes: int, *, where: str) -> tuple[str, Callable[..., Any]]:
    """The format that a file begins as, and Pillow's opener of it.

    Args:
        head: its first 16 bytes or more.
        num_bytes: of the whole file, for the message.

    Raises:
        DataError: no bytes, or not an image in a known format.
    """
    if not head:
        raise DataError("the image is empty (0 bytes)", where=where, do=REPLACE)
    # Image.open has a pixel limit in a module-wide variable and warns from half of it on. Calling the openers makes
    # cache.max_image_pixels the limit without touching a global.
    Image.init()
    for name in FORMATS:
        opener, accept = Image.OPEN.get(name, (None, None))
        # A string, not True, says that this Pillow lacks the codec. Padded because some index the prefix.
        if opener is not None and accept is not None and accept(head[:16].ljust(16, b"\0")) is True:
            return name, opener
    raise DataError(
        f"not an image in a format that can be read ({num_bytes} bytes, beginning with {head[:8]!r})",
        where=where,
        do=f"convert it to one of {', '.join(FORMATS)}, or set data.on_bad_record: report to leave its records out",
    )


@contextmanager
def as_data_error(what: str, where: str) -> Iterator[None]:
    """Whatever damage leads Pillow's decoders to raise, as a DataError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        raise DataError(f"{what}: {reason}", where=where, do=REPLACE) from error
