"""The cache stage: records -> image keys -> not yet committed? -> pixels -> tower -> features -> shard."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cache.atomic import disk_full
from cache.bad_records import reject_images
from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, DataConfig, ModelConfig
from cache.dataset import Rejection, require_few
from cache.errors import DataError, StoppedError
from cache.features import VisionFeatures
from cache.fingerprint import FORMAT_VERSION, Fingerprint
from cache.formats import FORMATS
from cache.manifest import Manifest, SplitImages, save_manifest, save_split
from cache.pixels import load_pixels
from cache.plan import Plan, free_bytes, make_plan
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.vision_tower import VisionTower
from cache.writer import CacheWriter

ShouldStop = Callable[[], bool]


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
        self.folder = cache_dir / self.fingerprint.name
        self.manifest = self._manifest(vision_config)

    def _manifest(self, vision_config: Any) -> Manifest:
        import transformers

        return Manifest(
            format_version=FORMAT_VERSION,
            format=self._cache.format,
            dtype=self._cache.dtype,
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

    def plan(self, split: str, progress: Progress) -> Plan:
        """See cache.plan.make_plan."""
        return make_plan(
            self._data,
            split,
            folder=self.folder,
            manifest=self.manifest,
            processor=self.processor,
            max_image_pixels=self._cache.max_image_pixels,
            progress=progress,
        )

    def run(self, split: str, progress: Progress, should_stop: ShouldStop = lambda: False) -> Summary:
        """Cache what is not cached yet of one split.

        Raises:
            DataError: see `plan`; also an image that turns out damaged when it is decoded.
            ResourceError: disk or device memory ran out; what was committed is intact.
            StoppedError: `should_stop` said so; what was committed is intact.
        """
        plan = self.plan(split, progress)
        free = free_bytes(self.folder)
        if plan.todo_bytes > free:
            raise disk_full(self.folder, f"{plan.todo_bytes / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
        save_manifest(self.folder, self.manifest)
        started = time.perf_counter()
        # Neither an interruption nor a bad image may cost what was computed before it: leaving the block commits.
        with CacheWriter(self.folder, FORMATS[self._cache.format], shard_size=self._cache.shard_size) as writer:
            broken = self._encode(plan, writer, progress, should_stop) if plan.todo else {}
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
        self, plan: Plan, writer: CacheWriter, progress: Progress, should_stop: ShouldStop
    ) -> dict[str, DataError]:
        """Encode and write what is to do; returns the images that could not be decoded, by path."""
        tower: VisionTower | None = None  # loaded for the first image that can be decoded
        broken: dict[str, DataError] = {}
        progress.start("encoding images", len(plan.todo), "image")
        for pixels in load_pixels([(image.key, ref) for image, ref in plan.todo], self.processor, self._cache):
            image, _ = plan.todo[pixels.index]
            if pixels.error is not None:
                paths = {other.path: pixels.error for other in plan.images if other.key == image.key}
                reject_images(plan.records, paths, self._data)
                broken |= paths
            else:
                tower = tower or VisionTower.load(self._model, self._cache, weights=self._weights)
                # One image at a time: what else is in a batch changes the last bits of an image's features.
                (features,) = tower.encode([pixels.pixel_values], [pixels.image_grid_thw])
                writer.add(image.key, _to_cpu(features))
            progress.advance()
            if should_stop():
                raise StoppedError("stopped; everything encoded so far is kept", do="run the same command to go on")
        progress.finish()
        return broken

    def _save_split(self, plan: Plan, broken: dict[str, DataError]) -> None:
        save_split(
            self.folder,
            SplitImages(
                split=plan.split,
                source=plan.path,
                num_records=plan.num_records,
                images=[image for image in plan.images if image.path not in broken],
                refused=plan.refused | {path: error.what for path, error in broken.items()},
            ),
        )


def _to_cpu(features: VisionFeatures) -> VisionFeatures:
    return VisionFeatures(features.image_embeds.cpu(), features.deepstack_features.cpu(), features.image_grid_thw)
