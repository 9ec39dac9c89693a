"""The cache stage: records -> image keys -> not yet committed? -> pixels -> tower -> features -> shard."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache.bad_records import reject_images
from cache.batches import batches, in_batch_order
from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, DataConfig, ModelConfig
from cache.copy_back import CopyBack
from cache.dataset import Rejection, require_few
from cache.errors import DataError, StoppedError
from cache.features import VisionFeatures
from cache.fingerprint import FORMAT_VERSION, Fingerprint
from cache.formats import FORMATS
from cache.manifest import (
    Manifest,
    RefusedImage,
    SplitImages,
    folder_name,
    load_refused,
    load_shard_indexes,
    save_manifest,
    save_refused,
    save_split,
)
from cache.parts import WHOLE, Part
from cache.patches import Normalizer
from cache.pixels import Pixels, load_pixels
from cache.plan import Plan, make_plan
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.vision_tower import VisionTower
from cache.writer import CacheWriter

ShouldStop = Callable[[], bool]
_Encoder = Callable[[list[Pixels]], list[VisionFeatures]]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of the cache stage did.

    Attributes:
        distinct_images, image_tokens: of the whole split.
        encoded_images, written_bytes, seconds: of this run; the seconds are those of encoding and writing.
    """

    split: str
    folder: Path
    num_records: int
    distinct_images: int
    image_tokens: int
    encoded_images: int
    written_bytes: int
    seconds: float
    rejected: list[Rejection]

    @property
    def images_per_second(self) -> float:
        """Rate of this run."""
        return self.encoded_images / self.seconds if self.seconds > 0 else 0.0

    def figures(self) -> dict[str, str | int | float]:
        """Everything but the rejected records, for a JSON file."""
        return {
            "split": self.split,
            "cache": str(self.folder),
            "num_records": self.num_records,
            "num_rejected": len(self.rejected),
            "distinct_images": self.distinct_images,
            "image_tokens": self.image_tokens,
            "encoded_images": self.encoded_images,
            "written_bytes": self.written_bytes,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 3),
        }


class CacheBuilder:
    """Caches the images of splits for one model and one setting.

    Args:
        model, data, cache: the configuration's sections.
        cache_dir: the cache's folder; this configuration's fingerprint names the folder within.
    """

    def __init__(self, model: ModelConfig, data: DataConfig, cache: CacheConfig, cache_dir: Path) -> None:
        self._model, self._data, self._cache = model, data, cache
        self._weights = VisionWeights.find(model)
        vision_config = load_hf_config(model).vision_config
        self.processor = ImageProcessor.from_checkpoint(model, cache)
        self.fingerprint = Fingerprint.of(
            weights=self._weights, vision_config=vision_config, processor=self.processor, cache=cache
        )
        self.folder = cache_dir / folder_name(self.fingerprint.name, cache.format)
        self.manifest = self._manifest(vision_config)

    def _manifest(self, vision_config: Any) -> Manifest:
        import transformers

        return Manifest(
            format_version=FORMAT_VERSION,
            format=self._cache.format,
            dtype=self._cache.dtype,
            storage_dtype=self._cache.storage_dtype,
            hidden_size=vision_config.out_hidden_size,
            num_deepstack_levels=len(vision_config.deepstack_visual_indexes),
            fingerprint=self.fingerprint.fields,
            made_by={
                "model": self._model.name_or_path,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        )

    def plan(self, split: str, progress: Progress, part: Part = WHOLE) -> Plan:
        """See cache.plan.make_plan."""
        return make_plan(
            self._data,
            split,
            folder=self.folder,
            manifest=self.manifest,
            processor=self.processor,
            max_image_pixels=self._cache.max_image_pixels,
            progress=progress,
            part=part,
        )

    def run(
        self,
        split: str,
        progress: Progress,
        should_stop: ShouldStop = lambda: False,
        part: Part = WHOLE,
    ) -> Summary:
        """Cache what is not cached yet of one split, or of one part of it.

        Raises:
            DataError: see `plan`; also an image that turns out damaged when it is decoded.
            ResourceError: disk or device memory ran out; what was committed is intact.
            StoppedError: `should_stop` said so; what was committed is intact.
        """
        plan = self.plan(split, progress, part)
        plan.require_space()
        save_manifest(self.folder, self.manifest)
        self._save_split(plan, {})  # parts that start later need not scan, and what is missing is noticed
        started = time.perf_counter()
        # Neither an interruption nor a bad image may cost what was computed before it: leaving the block commits.
        shard_format, size = FORMATS[self._cache.format], self._cache.shard_size
        with (
            CacheWriter(self.folder, shard_format, shard_size=size, num_entries=len(plan.todo)) as writer,
            CopyBack(writer, self._cache) as results,
        ):
            broken = self._encode(plan, results, progress, should_stop) if plan.todo else {}
        seconds = time.perf_counter() - started
        late = reject_images(plan.records, broken, self._data)
        rejected = [*plan.rejected, *late]
        require_few(rejected, plan.num_records, self._data, plan.path)
        self._save_split(plan, broken)
        return Summary(
            split=split,
            folder=self.folder,
            num_records=plan.num_records,
            distinct_images=plan.num_distinct,
            image_tokens=plan.image_tokens,
            encoded_images=writer.committed_images,
            written_bytes=writer.committed_bytes,
            seconds=seconds,
            rejected=rejected,
        )

    def _encode(
        self, plan: Plan, results: CopyBack, progress: Progress, should_stop: ShouldStop
    ) -> dict[str, DataError]:
        """Encode what is to do; returns the images that could not be decoded, by path."""
        encode: _Encoder | None = None  # loaded for the first image that can be decoded
        broken: dict[str, DataError] = {}
        progress.start("encoding images", len(plan.todo), "image")
        todo = in_batch_order(plan.todo, self._cache)
        refs = [(image.key, ref) for image, ref in todo]
        for batch in batches(load_pixels(refs, self.processor, self._cache), self._cache):
            decoded = [pixels for pixels in batch if pixels.error is None]
            for pixels in batch:
                if pixels.error is not None:
                    key = todo[pixels.index][0].key
                    paths = {other.path: pixels.error for other in plan.images if other.key == key}
                    reject_images(plan.records, paths, self._data)
                    broken |= paths
            if decoded:
                encode = encode or self._encoder()
                results.add([todo[pixels.index][0] for pixels in decoded], encode(decoded))
            progress.advance(len(batch))
            if should_stop():
                raise StoppedError("stopped; everything encoded so far is kept", do="run the same command to go on")
        progress.finish()
        return broken

    def _encoder(self) -> _Encoder:
        tower = VisionTower.load(self._model, self._cache, weights=self._weights)
        normalize = Normalizer(self.processor, tower.device)
        return lambda batch: tower.encode(
            [normalize(pixels.patches) for pixels in batch], [pixels.image_grid_thw for pixels in batch]
        )

    def _save_split(self, plan: Plan, broken: dict[str, DataError]) -> None:
        """Write the image list without what cannot be decoded, by this part or by others.

        Parts end at any time and know nothing of each other. Each tells what it could not decode in files of its own,
        before it writes the list, and looks again after: so the list that is written last lacks none of them.
        """
        keys = {image.path: image.key for image in plan.images}
        reasons = {keys[path]: error.what for path, error in broken.items()}
        for key, reason in reasons.items():
            save_refused(self.folder, RefusedImage(key=key, reason=reason))
        written = None
        while (found := load_refused(self.folder)) != written:
            committed = {e.key for i in load_shard_indexes(self.folder) for e in i.entries} if found else set()
            self._write_split(plan, {key: reason for key, reason in found.items() if key not in committed})
            written = found

    def _write_split(self, plan: Plan, reasons: dict[str, str]) -> None:
        save_split(
            self.folder,
            SplitImages(
                split=plan.split,
                source=plan.path,
                num_records=plan.num_records,
                images=[image for image in plan.images if image.key not in reasons],
                refused=plan.refused | {i.path: reasons[i.key] for i in plan.images if i.key in reasons},
                num_parts=plan.part.count,
            ),
        )
