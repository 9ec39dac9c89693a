"""The lists of a split's images, and of those that were refused, in a cache's folder."""

from __future__ import annotations

import errno
from pathlib import Path

from cache.documents import load, save
from cache.manifest import REFUSED, SPLITS
from cache.split_images import RefusedImage, SplitImages
from cache.split_lists import require_same_images

_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def split_file(folder: Path, split: str) -> Path:
    """Where the image list of a split lies."""
    return folder / SPLITS / f"{split}.json"


def save_split(folder: Path, images: SplitImages) -> None:
    """Write the image list of a split, unless it is there already.

    Raises:
        CacheError: there is one of another dataset's images.
        DataError: it would be too large to be read again.
        OSError: it cannot be written, and the one that is there does not do as well.
    """
    there = load_split(folder, images.split)
    if there == images:
        return
    require_same_images(there, images.images, images.root)
    smaller = "divide the split's file into several, each a split of its own in data.splits"
    try:
        save(split_file(folder, images.split), images, smaller=smaller)
    except OSError as error:
        # A cache that is complete is of use where it cannot be written, too.
        if error.errno not in _NOT_WRITABLE or there is None or _read_of(there) != _read_of(images):
            raise


def _read_of(images: SplitImages) -> tuple[object, ...]:
    """What reading the cache depends on; the rest tells of the dataset, so that less of it is hashed again."""
    return images.num_parts, images.refused, [(i.path, i.key, i.image_grid_thw, i.size) for i in images.images]


def load_split(folder: Path, split: str) -> SplitImages | None:
    """The image list of a split; None if the split has not been cached yet."""
    path = split_file(folder, split)
    return load(path, SplitImages) if path.exists() else None


def save_refused(folder: Path, image: RefusedImage) -> None:
    """Tell the writers of other parts that an image cannot be decoded, unless that is told already."""
    target = folder / REFUSED / f"{image.key}.json"
    if target.exists() and load_refused_image(target) == image:
        return
    target.parent.mkdir(exist_ok=True)
    save(target, image)


def load_refused(folder: Path) -> dict[str, str]:
    """Key -> reason of the images that some part could not decode."""
    found = [load_refused_image(path) for path in sorted((folder / REFUSED).glob("*.json"))]
    return {image.key: image.reason for image in found}


def load_refused_image(path: Path) -> RefusedImage:
    """One of the files of `load_refused`.

    Raises:
        CacheError: it is damaged.
    """
    return load(path, RefusedImage)
