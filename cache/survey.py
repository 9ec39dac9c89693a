"""Looks over whole splits before anything is spent: records, image headers, distinct contents. See cache.estimate."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cache.committed import Committed, Place
from cache.config import CacheConfig, DataConfig, ModelConfig
from cache.dataset import SplitRecords, read_split
from cache.errors import DataError
from cache.estimate import ASSUMPTIONS, FeatureShape, ImageFacts, Rates, SplitEstimate
from cache.headers import Header, content_ids, read_headers
from cache.many_objects import many_objects
from cache.plan import free_bytes
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import ImageRef


@dataclass(frozen=True, slots=True)
class Survey:
    """The splits of a configuration.

    Attributes:
        splits: each on its own, and, of more than one, all together at the end.
        dtype: which the configuration stores.
        target: the cache's folder; `free` the bytes that are free there.
    """

    splits: list[SplitEstimate]
    shape: FeatureShape
    dtype: str
    target: Path
    free: int
    rates: Rates = field(default_factory=Rates)

    @property
    def needed(self) -> int:
        """Bytes that are still to be written."""
        return self.splits[-1].missing_bytes(self.shape.bytes_per_token(self.dtype)) if self.splits else 0

    def figures(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {
            "cache": str(self.target),
            "free_bytes": self.free,
            "needed_bytes": self.needed,
            "dtype": self.dtype,
            "images_per_second": self.rates.images_per_second,
            "samples_per_second": self.rates.samples_per_second,
            "rates_from": dict(self.rates.sources),
            "assumptions": list(ASSUMPTIONS),
            "splits": {split.name: split.figures(self.shape, self.dtype, self.rates) for split in self.splits},
        }

    def describe(self) -> str:
        """The same in lines for a person."""
        lines = []
        for split in self.splits:
            lines += _describe_split(split, split.figures(self.shape, self.dtype, self.rates), self.dtype)
        cached = len(self.splits[-1].committed) if self.splits else 0
        besides = f" besides the {cached} images that are cached" if cached else ""
        lines.append(
            f"target {self.target}: {_size(self.free)} free, {_size(self.needed)} needed in {self.dtype}{besides}"
        )
        if self.needed > self.free:
            lines.append(
                "  NOT ENOUGH SPACE: `pipeline cache` will refuse; give another cache.dir or lower cache.max_pixels"
            )
        if self.rates.sources:
            lines.append("rates: " + "; ".join(f"{name} {source}" for name, source in self.rates.sources.items()))
            lines.append("assumed:")
            lines += [f"  - {assumption}" for assumption in ASSUMPTIONS]
        else:
            lines.append(
                "no rate is known yet: cache a split or train, or give --images-per-second, --samples-per-second"
            )
        return "\n".join(lines)


@many_objects()
def survey_splits(
    model: ModelConfig,
    data: DataConfig,
    cache: CacheConfig,
    *,
    target: Path,
    splits: Sequence[str],
    rates: Rates,
    progress: Progress,
) -> Survey:
    """Read the records and image headers of some splits. No image is decoded.

    An image that cannot be used is listed, and does not end the survey. Weights are read where a cache in `target` may
    have been made by them (cache.committed).

    Raises:
        ConfigError: an unknown split, or a model that is not there.
        DataError: a split's file or, with `data.on_bad_record: fail`, a row of it cannot be used.
        CacheError: the configuration's cache is damaged.
    """
    processor, shape = ImageProcessor.from_checkpoint(model, cache), FeatureShape.of(model)
    read = {split: read_split(data, split) for split in splits}
    # One look at each image, whatever splits it stands in.
    refs = {(split, r.path): r for split, records in read.items() for record in records.records for r in record.images}
    unique = {ref.file or place: ref for place, ref in refs.items()}
    headers = dict(zip(unique, read_headers(list(unique.values()), progress), strict=True))
    facts: dict[object, ImageFacts | DataError] = {
        name: image_facts(unique[name], header, processor, cache.max_image_pixels) for name, header in headers.items()
    }
    usable = [
        (n, unique[n], h) for n, h in headers.items() if isinstance(h, Header) and isinstance(facts[n], ImageFacts)
    ]
    ids = dict(zip([n for n, _, _ in usable], content_ids([(ref, h) for _, ref, h in usable]), strict=True))
    places = _places(read, refs, headers, ids)
    committed = Committed.find(model, cache, processor, target).among(places, progress)
    estimates = []
    for split, records in read.items():
        images = {
            p: (facts[r.file or (split, p)], ids.get(r.file or (split, p))) for (s, p), r in refs.items() if s == split
        }
        estimates.append(_estimate(split, records, images, committed))
    if len(estimates) > 1:
        estimates.append(SplitEstimate.together(estimates))
    stored = cache.dtype if cache.storage_dtype == "same" else cache.storage_dtype
    return Survey(estimates, shape, stored, target, free_bytes(target), rates)


def _places(
    read: Mapping[str, SplitRecords],
    refs: Mapping[tuple[str, str], ImageRef],
    headers: Mapping[Any, Header | DataError],
    ids: Mapping[Any, Hashable],
) -> dict[Hashable, list[Place]]:
    """Distinct image -> where it stands."""
    places: dict[Hashable, list[Place]] = {}
    for (split, path), ref in refs.items():
        name = ref.file or (split, path)
        header = headers[name]
        if name in ids and isinstance(header, Header):
            places.setdefault(ids[name], []).append(Place(split, read[split].root, ref, header.num_bytes))
    return places


def image_facts(
    ref: ImageRef, header: Header | DataError, processor: ImageProcessor, limit: int
) -> ImageFacts | DataError:
    """What an image's header says of it, or why it cannot be cached.

    Args:
        limit: cache.max_image_pixels.
    """
    if isinstance(header, DataError):
        return header
    if header.height * header.width > limit:
        return DataError(
            f"is {header.width}x{header.height}, more than cache.max_image_pixels = {limit}",
            where=ref.path,
            do="reduce the image, raise cache.max_image_pixels if memory allows, or leave its records "
            "out with data.on_bad_record: report",
        )
    try:
        grid = processor.grid_of(header.height, header.width, where=ref.path)
    except DataError as error:
        return error
    return ImageFacts(header.height, header.width, processor.num_tokens(grid))


def _estimate(
    split: str, records: SplitRecords, images: dict[str, tuple[Any, Any]], committed: Set[Hashable]
) -> SplitEstimate:
    refused = {path: fact.what for path, (fact, _) in images.items() if isinstance(fact, DataError)}
    usable = [r for r in records.records if not any(ref.path in refused for ref in r.images)]
    uses = [images[path][0] for record in usable for path in {ref.path: None for ref in record.images}]
    distinct = {key: fact for fact, key in images.values() if key is not None}
    return SplitEstimate(
        name=split,
        records=len(usable),
        image_uses=len(uses),
        used_tokens=sum(fact.tokens for fact in uses),
        images=distinct,
        refused=refused,
        committed=distinct.keys() & committed,
    )


def _describe_split(split: SplitEstimate, figures: dict[str, Any], dtype: str) -> list[str]:
    lines = [
        f"{split.name}: {split.records} records, {len(split.images)} distinct images in {split.image_uses} uses, "
        f"{split.tokens} image tokens"
    ]
    if split.committed:
        lines.append(f"  cached already   {len(split.committed)} images; {_size(figures['missing_bytes'])} to write")
    if split.refused:
        path, why = next(iter(split.refused.items()))
        lines.append(f"  cannot be used   {len(split.refused)} images, e.g. {path}: {why}")
    lines += [
        *_histogram("resolutions", figures["resolutions"]),
        *_histogram("tokens an image", figures["tokens_per_image"]),
    ]
    for name, levels in figures["bytes"].items():
        mark = " (configured)" if name == dtype else ""
        parts = ", ".join(f"{level} {_size(size)}" for level, size in levels.items() if level != "total")
        lines.append(f"  {name:16s} {_size(levels['total'])}{mark}: {parts}")
    lines += [f"  {label:48s} {show(figures[name])}" for name, label, show in _COSTS if name in figures]
    return lines


def _time(hours: float) -> str:
    seconds = 3600 * hours
    for limit, unit in ((60, "s"), (3600, "min")):
        if seconds < limit:
            return f"{seconds * 60 / limit:.2g} {unit}"
    return f"{hours:.3g} h"


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def _rate(megabytes: float) -> str:
    return f"{_size(1e6 * megabytes)}/s"


_COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("hours_to_cache", "time to cache", _time),
    ("tower_hours_saved_per_epoch_at_least", "tower time saved an epoch, at least", _time),
    ("tower_hours_saved_per_epoch_at_most", "tower time saved an epoch, at most", _time),
    ("epochs_until_it_pays_at_best", "epochs until it pays, at best", "{:.2g}".format),
    ("epochs_until_it_pays_at_worst", "epochs until it pays, at worst", "{:.2g}".format),
    ("hours_per_epoch_from_cache", "an epoch from the cache", _time),
    ("read_megabytes_per_second_each_image_once_an_epoch", "it reads, each image once an epoch", _rate),
    ("read_megabytes_per_second_each_image_for_each_sample", "it reads, each image for each sample", _rate),
)


def _histogram(title: str, counts: dict[str, int]) -> list[str]:
    most = max(counts.values(), default=1)
    return [f"  {title}", *(f"    {name:>14s} {n:8d} {'#' * max(1, 40 * n // most)}" for name, n in counts.items())]
