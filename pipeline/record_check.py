"""Whether the records of splits can be cached: asked once before an array of jobs is submitted for them."""

from __future__ import annotations

from collections.abc import Sequence

from cache.bad_records import reject_images
from cache.config import DataConfig
from cache.dataset import read_split, require_few
from cache.errors import DataError
from cache.headers import read_headers
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.survey import image_facts
from pipeline.config import PipelineConfig


def check_records(settings: PipelineConfig, splits: Sequence[str], progress: Progress) -> None:
    """Read the rows and the image headers; no image is decoded, so one that is damaged further on is found by its job.

    Raises:
        DataError: a record cannot be used, and `data.on_bad_record` is `fail` or too many are bad; as caching says it.
    """
    if splits:
        processor = ImageProcessor.from_checkpoint(settings.model, settings.cache)
        for split in splits:
            _check(settings.data, split, processor, settings.cache.max_image_pixels, progress)


def _check(data: DataConfig, split: str, processor: ImageProcessor, limit: int, progress: Progress) -> None:
    read = read_split(data, split)
    refs = list({ref.path: ref for record in read.records for ref in record.images}.values())
    found = zip(refs, read_headers(refs, progress), strict=True)
    facts = {ref.path: image_facts(ref, header, processor, limit) for ref, header in found}
    refused = {path: error for path, error in facts.items() if isinstance(error, DataError)}
    rejected = [*read.rejected, *reject_images(read.records, refused, data)]
    require_few(rejected, read.total, data, read.path)
