"""From the tower's device to the writer, in a thread of its own, while the tower runs on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from cache.background import Stage
from cache.config import CacheConfig
from cache.errors import PipelineError, StoppedError
from cache.features import StoredFeatures, VisionFeatures, stored_features
from cache.finite import finite_levels, require_finite
from cache.quantize import to_storage
from cache.split_images import SplitImage
from cache.waits import TOWER, Waits
from cache.writer import HELD_BACK, CacheWriter

BATCHES_AHEAD = 2  # the tower needs one queued behind the one that it runs
IN_FLIGHT = 1 - HELD_BACK  # of a shard's bytes; the rest is the writer's


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A batch that the tower has been asked for.

    Attributes:
        ready: on a GPU, the moment when it has been computed.
    """

    images: Sequence[SplitImage]
    features: Sequence[VisionFeatures]
    ready: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Begun:
    """An image on its way to page-locked memory.

    Attributes:
        finite: see finite_levels.
        done: on a GPU, the moment when both are there.
    """

    image: SplitImage
    features: StoredFeatures
    finite: torch.Tensor
    done: torch.cuda.Event | None


class CopyBack:
    """Takes features as they are asked for, and adds them to a cache in its storage dtype once they are there.

    Leaving the `with` block waits until all are handed to the writer. On a GPU nothing here keeps the calling thread or
    the tower waiting, as long as the writer keeps up. What piles up is what a kill costs, so it is at most as much as a
    shard holds: `BATCHES_AHEAD` batches here, the batch that the tower is asked for meanwhile, and what waits in the
    writer, one image at least for each shard in hand. Of batches too large for that, one piles up here.

    Args:
        waits: counts how long the copying thread waited for the tower's device.
    """

    def __init__(self, writer: CacheWriter, cache: CacheConfig, waits: Waits) -> None:
        self._writer, self._cache, self._waits = writer, cache, waits
        self._limit = int(IN_FLIGHT * cache.shard_size * BATCHES_AHEAD / (BATCHES_AHEAD + 1))
        self._stage = Stage[_Encoded]("copy features", self._store, limit=self._limit)
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> CopyBack:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            self._stage.drain()
        except (PipelineError, OSError) as failure:
            # A request to stop promises that everything is kept; any other error is the one to hear about first.
            if error is None or isinstance(error, StoppedError):
                raise
            error.add_note(f"What was encoded could not be kept either: {failure}")
        finally:
            self._stage.close()

    def add(self, images: Sequence[SplitImage], features: Sequence[VisionFeatures]) -> None:
        """Take a batch.

        Args:
            features: of each image; on a GPU they may be still to compute.

        Raises:
            DataError: an earlier image has features that are not finite; it is not stored.
            ResourceError: the disk is full; see CacheWriter.
        """
        ready, device = None, features[0].image_embeds.device
        if device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(torch.cuda.current_stream(device))  # by default that of the current GPU, perhaps another one
        num_bytes = sum(one.num_bytes for one in features)
        self._stage.put(_Encoded(images, features, ready), max(num_bytes, self._limit // BATCHES_AHEAD))

    def _store(self, batch: _Encoded) -> None:
        before: _Begun | None = None
        with self._beside_the_tower(batch):
            for image, features in zip(batch.images, batch.features, strict=True):
                try:
                    # Before the one before it is waited for: else each would wait for a place among the tower's kernels
                    # only when that one is hashed and handed on.
                    begun = self._begin(image, features)
                except BaseException:
                    self._keep(before)
                    raise
                self._keep(before)
                before = begun
            self._keep(before)

    def _begin(self, image: SplitImage, features: VisionFeatures) -> _Begun:
        """Check, convert and copy, without waiting for a GPU. What is on the CPU stays there.

        The memory comes from torch's pool of page-locked memory and goes back to it when the entry is written.
        """
        finite = finite_levels(features)
        # Where the tower ran: half the bytes to copy back.
        stored = to_storage(features, self._cache.storage_dtype, self._cache.dtype, require_finite=False)
        if not features.image_embeds.is_cuda:
            return _Begun(image, stored, finite, None)
        copies = {name: _begin_copy(tensor) if tensor.is_cuda else tensor for name, tensor in stored.tensors().items()}
        flags = _begin_copy(finite)
        # Who waits for it sleeps; the other kind would keep a core busy.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        return _Begun(image, stored_features(copies), flags, done)

    def _keep(self, begun: _Begun | None) -> None:
        """Hand over what was begun, once it is there."""
        if begun is None:
            return
        if begun.done is not None:
            with self._waits.on(TOWER):
                begun.done.synchronize()
        require_finite(begun.finite, dtype=self._cache.dtype, where=begun.image.path)
        self._writer.add(begun.image.key, begun.features)

    def _beside_the_tower(self, batch: _Encoded) -> AbstractContextManager[Any]:
        if batch.ready is None:
            return nullcontext()
        if self._stream is None:
            device = batch.features[0].image_embeds.device
            # Ahead of the tower's kernels, which would else keep each of these few small ones waiting for a place.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_event(batch.ready)
        return torch.cuda.stream(self._stream)


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
