"""What caching costs and what it brings, from header sizes alone: bytes, hours, read rate, epochs until it pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, get_args

from cache.checkpoint import load_hf_config
from cache.config import Dtype, ModelConfig
from cache.features import QUANTIZED_DTYPES
from cache.fingerprint import FORMAT_VERSION
from cache.manifest import Manifest

MOST_RESOLUTIONS = 12  # shown; the rest is summed up


@dataclass(frozen=True, slots=True)
class FeatureShape:
    """How many numbers the tower gives for an image token.

    Attributes:
        hidden_size: numbers a token and level.
        num_deepstack_levels: levels besides the main one.
    """

    hidden_size: int
    num_deepstack_levels: int

    @classmethod
    def of(cls, model: ModelConfig) -> FeatureShape:
        """From the checkpoint's config; no weights are read.

        Raises:
            ConfigError: the config cannot be loaded.
        """
        vision = load_hf_config(model).vision_config
        return cls(vision.out_hidden_size, len(vision.deepstack_visual_indexes))

    def bytes_per_token(self, dtype: str, *, levels: int | None = None) -> int:
        """Bytes a token in a storage dtype, over all levels or over so many DeepStack levels and the main one."""
        count = self.num_deepstack_levels if levels is None else levels
        described: dict[str, Any] = {"hidden_size": self.hidden_size, "num_deepstack_levels": count}
        described |= {"dtype": "bfloat16", "storage_dtype": dtype} if dtype in QUANTIZED_DTYPES else {"dtype": dtype}
        # The same formula as that of the cache that is made.
        return Manifest(
            format_version=FORMAT_VERSION, format="", fingerprint={}, made_by={}, **described
        ).bytes_per_token()

    def by_level(self, dtype: str, tokens: int) -> dict[str, int]:
        """Bytes of so many tokens: `main`, each `deepstack.N`, and `total`."""
        main = tokens * self.bytes_per_token(dtype, levels=0)
        total = tokens * self.bytes_per_token(dtype)
        levels = {
            f"deepstack.{n}": (total - main) // self.num_deepstack_levels for n in range(self.num_deepstack_levels)
        }
        return {"main": main, **levels, "total": total}


STORAGE_DTYPES: tuple[str, ...] = (*get_args(Dtype), *QUANTIZED_DTYPES)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Of one distinct image: upright size in pixels, and tokens in a sequence."""

    height: int
    width: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured or given.

    Attributes:
        images_per_second: of the cache stage, all processes together.
        samples_per_second: of training from the cache.
        sources: where each was found, by name, for a person.
        tokens_per_image: the mean of the images at which `images_per_second` was measured; larger ones take longer.
            None where it is a rate for the images that are planned.
    """

    images_per_second: float | None = None
    samples_per_second: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    tokens_per_image: float | None = None

    def tower_hours(self, images: int, tokens: int) -> float:
        """Hours of the cache stage for so many images with so many tokens together; needs `images_per_second`."""
        per_second = self.images_per_second or float("nan")
        return (tokens / self.tokens_per_image if self.tokens_per_image else images) / per_second / 3600


@dataclass(frozen=True, slots=True)
class SplitEstimate:
    """One split, or several together.

    Attributes:
        records: usable ones.
        image_uses: (record, image) pairs; an image of two questions counts twice.
        used_tokens: image tokens over all uses.
        images: the distinct ones by content.
        refused: image path -> why it cannot be used.
        committed: those of `images` that are cached already.
    """

    name: str
    records: int
    image_uses: int
    used_tokens: int
    images: Mapping[Hashable, ImageFacts]
    refused: Mapping[str, str]
    committed: Set[Hashable] = frozenset()

    @classmethod
    def together(cls, splits: list[SplitEstimate]) -> SplitEstimate:
        """All splits; an image that stands in two of them counts once."""
        return cls(
            "together",
            sum(s.records for s in splits),
            sum(s.image_uses for s in splits),
            sum(s.used_tokens for s in splits),
            {key: image for s in splits for key, image in s.images.items()},
            {path: why for s in splits for path, why in s.refused.items()},
            frozenset().union(*(s.committed for s in splits)),
        )

    @property
    def tokens(self) -> int:
        """Image tokens of the distinct images."""
        return sum(image.tokens for image in self.images.values())

    @property
    def missing(self) -> list[ImageFacts]:
        """The distinct images that are not cached yet."""
        return [image for key, image in self.images.items() if key not in self.committed]

    def missing_bytes(self, bytes_per_token: int) -> int:
        """What they will take."""
        return sum(image.tokens for image in self.missing) * bytes_per_token

    def resolutions(self) -> dict[str, int]:
        """`WIDTHxHEIGHT` -> distinct images, the most frequent first, the rare ones summed up as `other`."""
        counts = Counter(f"{image.width}x{image.height}" for image in self.images.values())
        shown = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MOST_RESOLUTIONS])
        rest = len(self.images) - sum(shown.values())
        return {**shown, "other": rest} if rest else shown

    def token_histogram(self) -> dict[str, int]:
        """`LOW-HIGH` image tokens, by powers of two -> distinct images."""
        counts = Counter(image.tokens.bit_length() for image in self.images.values())
        return {f"{1 << bits - 1}-{(1 << bits) - 1}": counts[bits] for bits in sorted(counts)}

    def costs(self, bytes_per_token: int, rates: Rates) -> dict[str, float]:
        """Hours, MB/s and epochs that follow from the rates; see ASSUMPTIONS. Empty without images or rates.

        Args:
            bytes_per_token: of the dtype that the configuration stores.
        """
        found: dict[str, float] = {}
        if not self.images:
            return found
        if rates.images_per_second:
            missing = self.missing
            once = rates.tower_hours(len(self.images), self.tokens)
            each_time = rates.tower_hours(self.image_uses, self.used_tokens)
            found["hours_to_cache"] = rates.tower_hours(len(missing), sum(image.tokens for image in missing))
            found["tower_hours_saved_per_epoch_at_least"] = once
            found["tower_hours_saved_per_epoch_at_most"] = each_time
            # The rate cancels out: the cache stage runs the tower once an image, an epoch once a use or once an image.
            found["epochs_until_it_pays_at_best"] = once / each_time
            found["epochs_until_it_pays_at_worst"] = 1.0
        if rates.samples_per_second:
            tokens_per_second = rates.samples_per_second / self.records
            for name, tokens in (("once_an_epoch", self.tokens), ("for_each_sample", self.used_tokens)):
                read = tokens * bytes_per_token * tokens_per_second
                found[f"read_megabytes_per_second_each_image_{name}"] = read / 1e6
            found["hours_per_epoch_from_cache"] = self.records / rates.samples_per_second / 3600
        return found

    def figures(self, shape: FeatureShape, dtype: str, rates: Rates) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {
            "records": self.records,
            "image_uses": self.image_uses,
            "distinct_images": len(self.images),
            "cached_images": len(self.committed),
            "missing_bytes": self.missing_bytes(shape.bytes_per_token(dtype)),
            "refused_images": dict(self.refused),
            "image_tokens": self.tokens,
            "resolutions": self.resolutions(),
            "tokens_per_image": self.token_histogram(),
            "bytes": {name: shape.by_level(name, self.tokens) for name in STORAGE_DTYPES},
            **self.costs(shape.bytes_per_token(dtype), rates),
        }


ASSUMPTIONS = (
    "without the cache the tower runs at the rate of the cache stage (which decodes and writes as well)",
    "at best: every question on an image runs the tower anew; at worst: once an image and epoch, because all its "
    "questions fall into the same step",
    "a measured rate holds for tokens: images of twice the tokens take twice as long (somewhat longer, where attention "
    "weighs); a given one holds for images",
    "reading is free as long as the disk gives the read rate above: each image once an epoch is what train.order: "
    "image reads, but for the images whose questions fall into two steps; each for each sample is the most, when no "
    "two samples of a step share an image",
    "samples_per_second is that of training from the cache",
    "bytes are those of the features; names, indexes and padding add a few kB an image at most",
)
