"""Records + the images' keys and grids -> samples. What can be wrong with a record is found here, up front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cache.bad_records import LEAVE_OUT
from cache.config import DataConfig
from cache.dataset import Rejection, SplitRecords, read_split, require_few
from cache.errors import DataError
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import Record
from cache.scan import ImageScanner
from cache.split_images import SplitImages
from cache.split_lists import changed_images
from train.chat import ChatEncoder, EncodedText
from train.sample import Sample, SampleImage, make_sample


@dataclass(frozen=True, slots=True)
class KnownImages:
    """Key and grid of every image of a split, and why others were refused.

    Attributes:
        images: path -> (key, grid).
        refused: path -> reason.
        listed: the cache's image list, where they come from one.
    """

    images: dict[str, tuple[str, tuple[int, int, int]]]
    refused: dict[str, str]
    listed: SplitImages | None = None

    @classmethod
    def of(cls, split: SplitImages) -> KnownImages:
        """From the cache's image list: no image file is touched."""
        return cls({i.path: (i.key, i.image_grid_thw) for i in split.images}, split.refused, split)

    def compared(self, read: SplitRecords, progress: Progress) -> KnownImages:
        """These, with the images refused that are there and no longer those of the cache's list.

        Raises:
            CacheError: the list is another dataset's.
        """
        if self.listed is None:
            return self
        changed = changed_images(read.records, self.listed, read.root, progress)
        return replace(self, refused={**self.refused, **changed}) if changed else self

    @classmethod
    def scan(
        cls, records: Sequence[Record], processor: ImageProcessor, max_image_pixels: int, progress: Progress
    ) -> KnownImages:
        """From the image files' headers, for the live path."""
        scanned = ImageScanner(processor, (), max_image_pixels).scan(records, progress)
        return cls(
            {i.ref.path: (i.listed.key, i.listed.image_grid_thw) for i in scanned if i.listed is not None},
            {i.ref.path: i.error.what for i in scanned if i.error is not None},
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """The usable samples of a split, in the dataset's order.

    Attributes:
        records: the record of each sample.
        rejected: the records left out, with reasons.
    """

    samples: list[Sample]
    records: list[Record]
    rejected: list[Rejection]

    def also_in(self, other: Samples) -> Samples:
        """The samples whose record is in `other` too; what only `other` left out counts as left out."""
        there = {record.source for record in other.records}
        kept = [index for index, record in enumerate(self.records) if record.source in there]
        named = {rejection.source for rejection in self.rejected}
        return Samples(
            [self.samples[index] for index in kept],
            [self.records[index] for index in kept],
            [*self.rejected, *(rejection for rejection in other.rejected if rejection.source not in named)],
        )

    def first(self, limit: int | None) -> Samples:
        """The first so many samples; all where `limit` is None."""
        return Samples(self.samples[:limit], self.records[:limit], self.rejected)


@dataclass(frozen=True, slots=True)
class SampleBuilder:
    """Turns records into samples.

    Attributes:
        encoder: the checkpoint's chat template and tokenizer.
        merge_size: of the image processor.
        data: the dataset's settings.
    """

    encoder: ChatEncoder
    merge_size: int
    data: DataConfig

    def training(self, split: str, known: Callable[[Sequence[Record]], KnownImages], progress: Progress) -> Samples:
        """Samples with targets.

        Raises:
            DataError: a record cannot be used, and `data.on_bad_record` is `fail` or too many are bad.
            CacheError: the cache's list of the split is another dataset's.
        """
        return self._build(split, known, progress, self.encoder.encode)

    def prompts(self, split: str, known: Callable[[Sequence[Record]], KnownImages], progress: Progress) -> Samples:
        """Samples that end where the last answer is to be generated. Raises as `training`."""
        return self._build(split, known, progress, self.encoder.encode_prompt)

    def _build(
        self,
        split: str,
        known: Callable[[Sequence[Record]], KnownImages],
        progress: Progress,
        encode: Callable[[Record], EncodedText],
    ) -> Samples:
        read = read_split(self.data, split)
        images = known(read.records).compared(read, progress)
        rejected = list(read.rejected)
        samples, records = [], []
        progress.start(f"tokenizing {split}", len(read.records), "record")
        for record in read.records:
            progress.advance()
            try:
                samples.append(self._sample(record, encode(record), images))
                records.append(record)
            except DataError as error:
                if self.data.on_bad_record == "fail":
                    raise
                rejected.append(Rejection(record.source, error.what))
        progress.finish()
        require_few(rejected, read.total, self.data, read.path)
        return Samples(samples, records, rejected)

    def _sample(self, record: Record, text: EncodedText, known: KnownImages) -> Sample:
        images = []
        for index in text.image_order:
            ref = record.images[index]
            if ref.path in known.refused:
                raise DataError(f"image {ref.path}: {known.refused[ref.path]}", where=record.source, do=LEAVE_OUT)
            if ref.path not in known.images:
                raise DataError(
                    f"image {ref.path} is not in the cache: the dataset has changed since it was cached",
                    where=record.source,
                    do="run `pipeline cache` for this split again",
                )
            key, grid = known.images[ref.path]
            images.append(SampleImage(key, grid, ref))
        sample = make_sample(text, tuple(images), merge_size=self.merge_size, source=record.source)
        if sample.num_tokens > self.data.max_length:
            raise DataError(
                f"is {sample.num_tokens} tokens long, more than data.max_length = {self.data.max_length}",
                where=record.source,
                do="raise data.max_length, lower cache.max_pixels, or leave it out with data.on_bad_record: report; "
                "samples are never cut, since that would cut through image tokens",
            )
        return sample
