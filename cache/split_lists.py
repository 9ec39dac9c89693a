"""Whose images a split's list names: the same names may stand for other files under another root."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cache.errors import CacheError, DataError, ReadError
from cache.keys import image_key
from cache.progress import Progress
from cache.records import ImageRef, Record
from cache.split_images import SplitImage, SplitImages

_Verdict = Literal["same", "changed", "absent", "unsure"]
_Pair = tuple[ImageRef, SplitImage]
_Look = Callable[[ImageRef, SplitImage], _Verdict]

THREADS = 8
CHUNK = 64  # images a task: a task an image would cost as much as looking at the file
HASHED = 512  # images whose content is compared at most, at each start


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

    A list of another root is of the same images, which have been moved, unless most of what both name has another
    content. Where they have no name in common, a part of the path may have changed: one content in common is enough.

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
    others = [image.path for image in shared if keys[image.path] != image.key]
    if shared and 2 * len(others) > len(shared):
        raise other_root(there, root, f"{others[0]} is another image there", _old_place(there))
    if not shared and {image.key for image in images}.isdisjoint(keys.values()):
        raise other_root(there, root, "the two have no image in common", _old_place(there))


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


def _old_place(there: SplitImages) -> str:
    return f"remove {there.split}.json below splits/ if it is the old place of this split"


def known_images(
    records: Sequence[Record], there: SplitImages | None, root: str, progress: Progress
) -> list[SplitImage]:
    """The listed images whose size and modification time tell that they are unchanged, so that they need not be read.

    Under the same root these are all. Under another one those that are here with the same size and time, if of HASHED
    of them, evenly spread, the content is the same, too: a copy that kept the times is not read whole.

    Raises:
        CacheError: the list is of another root, and most images of the same names are others.
    """
    if there is None or same_root(there.root, root):
        return there.images if there is not None else []
    found = _compare(_pairs(records, there), _before_scan, progress)
    if found.mostly_changed:
        raise other_root(there, root, f"{found.changed[0]} is another image there", _old_place(there))
    return [image for _, image in found.unsure] if found.sample_same else []


def changed_images(records: Sequence[Record], there: SplitImages, root: str, progress: Progress) -> dict[str, str]:
    """Images that are no longer those that a list names, as far as they are here: path -> what is wrong.

    What has the size and modification time of the list under the same root is taken for the same, another size for
    another image. Of the others HASHED are hashed, evenly spread: a dataset that was copied need not be read whole at
    every start, and one that is another will hardly have equal sizes throughout. Image files need not be there.

    Raises:
        CacheError: the list is of another root, and most of the images compared are others.
    """
    pairs = _pairs(records, there)
    moved = not same_root(there.root, root)
    if not os.path.isdir(root):  # noqa: PTH112 - Path.is_dir raises where a folder may not be entered
        pairs = [(ref, image) for ref, image in pairs if ref.data is not None]
    found = _compare(pairs, _by_size if moved else _under_same_root, progress)
    if moved and found.mostly_changed:
        same = "if they are the same images after a change, run `pipeline cache` for this split again"
        raise other_root(there, root, f"{found.changed[0]} is another image", same)
    what = "the file has changed since it was cached; `pipeline cache` for this split takes it up"
    return dict.fromkeys(found.changed, what)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What comparing images with a list has shown.

    Attributes:
        changed: paths of those found to be others.
        mostly_changed: whether so are most of those that are here, the unsure ones in the sample's proportion.
        unsure: those that only their content can tell.
        sample_same: whether the sample of these has the listed content throughout; False where there is none.
    """

    changed: list[str]
    mostly_changed: bool
    unsure: Sequence[_Pair]
    sample_same: bool


def _pairs(records: Sequence[Record], there: SplitImages) -> list[_Pair]:
    listed = {image.path: image for image in there.images}
    refs = {ref.path: ref for record in records for ref in record.images if ref.path in listed}
    return [(ref, listed[path]) for path, ref in refs.items()]


def _compare(pairs: Sequence[_Pair], look: _Look, progress: Progress) -> _Comparison:
    if not pairs:
        return _Comparison([], mostly_changed=False, unsure=[], sample_same=False)
    with ThreadPoolExecutor(THREADS) as pool:
        looked_at = _each(pool, pairs, look, progress)
        unsure = [pair for pair, verdict in zip(pairs, looked_at, strict=True) if verdict == "unsure"]
        sample = unsure[:: -(-len(unsure) // HASHED) or 1]
        hashed = _each(pool, sample, _by_content, progress) if sample else []
    found = [*zip(pairs, looked_at, strict=True), *zip(sample, hashed, strict=True)]
    told = len(hashed) - hashed.count("absent")
    changed = looked_at.count("changed") + (len(unsure) * hashed.count("changed") / told if told else 0)
    return _Comparison(
        changed=[ref.path for (ref, _), verdict in found if verdict == "changed"],
        mostly_changed=2 * changed > len(pairs) - looked_at.count("absent"),
        unsure=unsure,
        sample_same=bool(hashed) and hashed.count("same") == len(hashed),
    )


def _each(
    pool: ThreadPoolExecutor,
    pairs: Sequence[_Pair],
    look: _Look,
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


def _by_size(ref: ImageRef, listed: SplitImage) -> _Verdict:
    """Times of another root tell nothing."""
    return _by_stamp(ref, listed, same_time="unsure", other_time="unsure")


def _under_same_root(ref: ImageRef, listed: SplitImage) -> _Verdict:
    return _by_stamp(ref, listed, same_time="same", other_time="unsure")


def _before_scan(ref: ImageRef, listed: SplitImage) -> _Verdict:
    """Nothing is to be found out here of what the scan will read anyway."""
    return _by_stamp(ref, listed, same_time="unsure", other_time="same")


def _by_stamp(ref: ImageRef, listed: SplitImage, *, same_time: _Verdict, other_time: _Verdict) -> _Verdict:
    stamp = ref.stamp()
    if stamp is None:
        return "absent"
    if stamp.size != listed.size:
        return "changed"
    return same_time if stamp.mtime_ns and stamp.mtime_ns == listed.mtime_ns else other_time


def _by_content(ref: ImageRef, listed: SplitImage) -> _Verdict:
    try:
        return "same" if image_key(ref.read()) == listed.key else "changed"
    except (DataError, ReadError):
        return "absent"  # training needs no image files: one that it may not read is as good as none
