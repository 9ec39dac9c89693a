"""Whose images a split's list names: the same names may stand for other files under another root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cache.errors import CacheError, DataError, ReadError
from cache.keys import image_key
from cache.progress import Progress
from cache.records import ImageRef, Record

if TYPE_CHECKING:  # cache.manifest uses this module
    from cache.manifest import SplitImage, SplitImages

_Verdict = Literal["same", "changed", "absent", "unsure"]

THREADS = 8
CHUNK = 64  # images a task: a task an image would cost as much as looking at the file
HASHED = 512  # images whose content is compared at most, at each start of a training


def same_root(one: str | None, other: str | None) -> bool:
    """Whether names relative to the two are the same files. Lists of earlier versions have none: taken as the same."""
    if one is None or other is None or one == other:
        return True
    try:
        return Path(one).samefile(other)
    except OSError:
        return False


def require_same_images(there: SplitImages | None, images: Sequence[SplitImage], root: str | None) -> None:
    """Refuse to replace a list of other images.

    A list of another root is of the same images, which have been moved, if what both name has the same content.

    Args:
        there: the list that is there.
        images: what is going to be listed, relative to `root`.

    Raises:
        CacheError: it is a list of others. Names both roots.
    """
    if there is None or same_root(there.root, root) or not there.images:
        return
    keys = {image.path: image.key for image in there.images}
    shared = [image for image in images if image.path in keys]
    other = next((image.path for image in shared if keys[image.path] != image.key), None)
    if shared and other is None:
        return
    what = f"{other} is another image there" if other else "the two have no image in common"
    raise other_root(there, root, what, f"remove {there.split}.json below splits/ if it is the old place of this split")


def other_root(there: SplitImages, root: str | None, what: str, same: str) -> CacheError:
    """The error for a list whose images lie elsewhere.

    Args:
        what: how that is known.
        same: what to do if it is the same dataset after all.
    """
    return CacheError(
        f"this cache's list of split {there.split!r} is of the images in {there.root}, the configuration's are in "
        f"{root}: {what}",
        where=f"splits/{there.split}.json",
        do=f"give another output_dir (or cache.dir), or call the split otherwise in data.splits; {same}",
    )


def changed_images(records: Sequence[Record], there: SplitImages, root: str, progress: Progress) -> dict[str, str]:
    """Images that are no longer those that a list names, as far as they are here: path -> what is wrong.

    What has the size and modification time of the list under the same root is taken for the same, another size for
    another image. Of the others HASHED are hashed, evenly spread: a dataset that was copied need not be read whole at
    every start, and one that is another will hardly have equal sizes throughout. Image files need not be there.

    Raises:
        CacheError: the list is of another root and names other images.
    """
    listed = {image.path: image for image in there.images}
    refs = {ref.path: ref for record in records for ref in record.images if ref.path in listed}
    moved = not same_root(there.root, root)
    if not Path(root).is_dir():
        refs = {path: ref for path, ref in refs.items() if ref.data is not None}
    changed: dict[str, str] = {}
    for path in _changed([(ref, listed[path]) for path, ref in refs.items()], progress, trusted=not moved):
        if moved:
            raise other_root(
                there,
                root,
                f"{path} is another image",
                "if they are the same images after a change, run `pipeline cache` for this split again",
            )
        changed[path] = "the file has changed since it was cached; `pipeline cache` for this split takes it up"
    return changed


def _changed(pairs: Sequence[tuple[ImageRef, SplitImage]], progress: Progress, *, trusted: bool) -> list[str]:
    if not pairs:
        return []
    with ThreadPoolExecutor(THREADS) as pool:
        looked_at = _each(pool, pairs, lambda ref, image: _by_stamp(ref, image, trusted=trusted), progress)
        unsure = [pair for pair, found in zip(pairs, looked_at, strict=True) if found == "unsure"]
        chosen = unsure[:: -(-len(unsure) // HASHED) or 1]
        hashed = _each(pool, chosen, _by_content, progress) if chosen else []
    found = [*zip(pairs, looked_at, strict=True), *zip(chosen, hashed, strict=True)]
    return [ref.path for (ref, _), verdict in found if verdict == "changed"]


def _each(
    pool: ThreadPoolExecutor,
    pairs: Sequence[tuple[ImageRef, SplitImage]],
    look: Callable[[ImageRef, SplitImage], _Verdict],
    progress: Progress,
) -> list[_Verdict]:
    found: list[_Verdict] = []
    progress.start("comparing images with the cache's list", len(pairs), "image")
    tasks = [pairs[at : at + CHUNK] for at in range(0, len(pairs), CHUNK)]
    for part in pool.map(lambda task: [look(ref, image) for ref, image in task], tasks):
        found += part
        progress.advance(len(part))
    progress.finish()
    return found


def _by_stamp(ref: ImageRef, listed: SplitImage, *, trusted: bool) -> _Verdict:
    stamp = ref.stamp()
    if stamp is None:
        return "absent"
    if stamp.size != listed.size:
        return "changed"
    return "same" if trusted and stamp.mtime_ns and stamp.mtime_ns == listed.mtime_ns else "unsure"


def _by_content(ref: ImageRef, listed: SplitImage) -> _Verdict:
    try:
        return "same" if image_key(ref.read()) == listed.key else "changed"
    except (DataError, ReadError):
        return "absent"  # training needs no image files: one that it may not read is as good as none
