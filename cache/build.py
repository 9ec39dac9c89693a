"""The cache stage: records -> image keys -> not yet committed? -> pixels -> tower -> features -> shard."""

from __future__ import annotations

import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cache.background import quick_handovers
from cache.bad_records import list_rejected, reject_images
from cache.batches import batches, in_batch_order
from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, DataConfig, ModelConfig
from cache.copy_back import CopyBack
from cache.dataset import Rejection, require_few
from cache.errors import DataError, StoppedError
from cache.features import VisionFeatures
from cache.fingerprint import FORMAT_VERSION, Fingerprint
from cache.formats import FORMATS
from cache.image_processor_choice import require_gpu
from cache.index import EntryIndex
from cache.manifest import Manifest, folder_name, save_manifest
from cache.parts import WHOLE, Part
from cache.pixels import Pixels, load_pixels, values_on
from cache.plan import Plan, make_plan
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.records import ImageRef
from cache.salvage import take_up
from cache.scan_note import ScanNote
from cache.split_files import load_refused, save_refused, save_split
from cache.split_images import RefusedImage, SplitImages
from cache.summary import Summary
from cache.vision_tower import VisionTower, resolve_device
from cache.waits import DISK, IMAGES, TOWER, Waits
from cache.writer import CacheWriter

ShouldStop = Callable[[], bool]
_Encoder = Callable[[list[Pixels]], list[VisionFeatures]]


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

    def plan(
        self,
        split: str,
        progress: Progress,
        part: Part = WHOLE,
        should_stop: ShouldStop = lambda: False,
        *,
        keep_scan: bool = False,
    ) -> Plan:
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
            should_stop=should_stop,
            keep_scan=keep_scan,
        )

    def list_images(
        self, split: str, progress: Progress, should_stop: ShouldStop = lambda: False, part: Part = WHOLE
    ) -> Plan:
        """Plan, and write the image list, so that others which start later need not read the images for it.

        Raises:
            PipelineError: see `plan`; also ResourceError where the space does not suffice.
        """
        plan = self.plan(split, progress, part, should_stop, keep_scan=True)
        plan.require_space()
        save_manifest(self.folder, self.manifest)
        self._save_split(plan, {})
        ScanNote(self.folder, split, plan.root).remove()
        return plan

    def run(
        self,
        split: str,
        progress: Progress,
        should_stop: ShouldStop = lambda: False,
        part: Part = WHOLE,
        list_rejected_in: Path | None = None,
    ) -> Summary:
        """Cache what is not cached yet of one split, or of one part of it.

        Args:
            list_rejected_in: folder for the list of the records left out; the part that ends last leaves it complete.

        Raises:
            DataError: see `plan`; also an image that turns out damaged when it is decoded.
            ResourceError: disk or device memory ran out; what was committed is intact.
            StoppedError: `should_stop` said so; what was committed is intact.
        """
        require_gpu(self.processor.device, resolve_device(self._cache.device))
        plan = self.list_images(split, progress, should_stop, part)  # what is missing is noticed from now on
        # Neither an interruption nor a bad image may cost what was computed before it: leaving the block commits.
        shard_format, size = FORMATS[self._cache.format], self._cache.shard_size
        waits = Waits(IMAGES, TOWER)
        with (
            quick_handovers(),
            CacheWriter(self.folder, shard_format, shard_size=size, num_entries=len(plan.todo)) as writer,
            CopyBack(writer, self._cache, waits) as results,
        ):
            todo = take_up(plan.todo, writer, self.manifest, self.processor.num_tokens, progress, should_stop)
            left = replace(plan, todo=todo)
            started, taking_up = time.perf_counter(), writer.waited
            broken = self._encode(left, results, waits, progress, should_stop) if left.todo else {}
        seconds = time.perf_counter() - started
        late = reject_images(plan.records, broken, self._data)
        require_few([*plan.rejected, *late], plan.num_records, self._data, plan.path)
        rejected = self._save_split(plan, broken, list_rejected_in)
        require_few(rejected, plan.num_records, self._data, plan.path)
        return Summary(
            split=split,
            folder=self.folder,
            num_records=plan.num_records,
            distinct_images=plan.num_distinct,
            image_tokens=plan.image_tokens,
            recovered_images=len(plan.todo) - len(left.todo),
            encoded_images=writer.committed_images - len(plan.todo) + len(left.todo),
            written_bytes=writer.committed_bytes,
            seconds=seconds,
            waited=waits.seconds | {DISK: writer.waited - taking_up},
            rejected=rejected,
        )

    def _encode(
        self, plan: Plan, results: CopyBack, waits: Waits, progress: Progress, should_stop: ShouldStop
    ) -> dict[str, DataError]:
        """Encode what is to do; returns the images that could not be decoded, by path."""
        encode: _Encoder | None = None  # loaded for the first image that can be decoded
        broken: dict[str, DataError] = {}
        progress.start("encoding images", len(plan.todo), "image")
        todo = in_batch_order(plan.todo, self._cache)
        refs = [(image.key, ref) for image, ref in todo]
        names = defaultdict[str, list[str]](list)
        for image in plan.images:
            names[image.key].append(image.path)
        decoding = waits.each(IMAGES, load_pixels(refs, self.processor, self._cache))
        for batch in batches(decoding, self._cache):
            decoded = [pixels for pixels in batch if pixels.error is None]
            for pixels in batch:
                if pixels.error is not None:
                    paths = dict.fromkeys(names[todo[pixels.index][0].key], pixels.error)
                    if self._data.on_bad_record == "fail":
                        reject_images(plan.records, paths, self._data)
                    broken |= paths
            if decoded:
                encode = encode or self._encoder(refs, waits)
                results.add([todo[pixels.index][0] for pixels in decoded], encode(decoded))
            progress.advance(len(batch))
            if should_stop():
                raise StoppedError("stopped; everything encoded so far is kept", do="run the same command to go on")
        progress.finish()
        return broken

    def _encoder(self, refs: Sequence[tuple[str, ImageRef]], waits: Waits) -> _Encoder:
        tower = VisionTower.load(self._model, self._cache, weights=self._weights)
        values = values_on(tower.device, refs, self.processor)

        def encode(batch: list[Pixels]) -> list[VisionFeatures]:
            # A GPU is only asked here; cache.copy_back waits for it.
            with waits.on(TOWER) if tower.device.type == "cpu" else nullcontext():
                return tower.encode([values(pixels) for pixels in batch], [p.image_grid_thw for p in batch])

        return encode

    def _save_split(
        self, plan: Plan, broken: dict[str, DataError], list_rejected_in: Path | None = None
    ) -> list[Rejection]:
        """Write the image list without what cannot be decoded, by this part or by others; returns what that rejects.

        Parts end at any time and know nothing of each other. Each tells what it could not decode in files of its own,
        before it writes the lists, and looks again after: so the lists that are written last lack none of them.
        """
        keys = {image.path: image.key for image in plan.images}
        reasons = {keys[path]: error.what for path, error in broken.items()}
        for key, reason in reasons.items():
            save_refused(self.folder, RefusedImage(key=key, reason=reason))
        written, rejected = None, plan.rejected
        while (found := load_refused(self.folder)) != written:
            told = list(found)
            known = {told[n]: found[told[n]] for n in EntryIndex.open(self.folder).missing(told)} if told else {}
            late = {image.path: known[image.key] for image in plan.images if image.key in known}
            self._write_split(plan, late)
            rejected = [*plan.rejected, *self._reject_late(plan, late)]
            if list_rejected_in is not None:
                list_rejected(list_rejected_in, plan.split, rejected)
            written = found
        return rejected

    def _reject_late(self, plan: Plan, reasons: dict[str, str]) -> list[Rejection]:
        """The records that name an image that cannot be decoded; with `fail` none, since the part that has it fails."""
        if self._data.on_bad_record == "fail":
            return []
        errors = {
            path: DataError(reason, where=path, do="mend the image, or leave it out")
            for path, reason in reasons.items()
        }
        return reject_images(plan.records, errors, self._data)

    def _write_split(self, plan: Plan, late: dict[str, str]) -> None:
        save_split(
            self.folder,
            SplitImages(
                split=plan.split,
                source=plan.path,
                num_records=plan.num_records,
                root=plan.root,
                images=[image for image in plan.images if image.path not in late],
                refused=plan.refused | late,
                num_parts=plan.part.count,
            ),
        )
