"""The data side of training and evaluation: tokens, images, and where features come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from cache.checkpoint import load_hf_config
from cache.fingerprint import expected_fingerprint
from cache.image_processor_choice import require_gpu
from cache.preprocess import ImageProcessor
from cache.progress import Progress
from cache.reader import FeatureCache
from cache.records import Record
from cache.remote import find_cache_at
from cache.staging import stage
from cache.vision_tower import VisionTower
from train.attention import attention_kind
from train.chat import ChatEncoder
from train.config import DEFAULT_TOKENS_PER_PACK, TrainConfig
from train.dataset import KnownImages, SampleBuilder, Samples
from train.features import CachedSource, FeatureSource, LiveSource
from train.job import Job
from train.model import training_device
from train.step_dataset import StepDataset


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the data side of a run needs: tokens, images, and where features come from."""

    image_token_id: int
    processor: ImageProcessor
    samples: SampleBuilder
    cache: FeatureCache | None
    source: FeatureSource
    max_image_pixels: int

    @classmethod
    def open(cls, job: Job) -> Inputs:
        """Open tokenizer, image processor and cache.

        Raises:
            ConfigError: the checkpoint lacks something.
            CacheError: there is no cache for this configuration.
        """
        image_token_id = int(load_hf_config(job.model).image_token_id)
        processor = ImageProcessor.from_checkpoint(job.model, job.cache)
        encoder = ChatEncoder.from_checkpoint(job.model, image_token_id)
        cache, limit = None, job.cache.max_image_pixels
        source: FeatureSource = LiveSource(processor, limit)
        if job.from_cache:
            cache = find_cache_at(
                job.cache_dir,
                expected_fingerprint(job.model, job.cache),
                any_backend=job.cache.image_processor_backend == "auto",
                verify_checksums=job.cache.verify_checksums,
            )
            source = CachedSource(cache)
        builder = SampleBuilder(encoder, processor.merge_size, job.data)
        return cls(image_token_id, processor, builder, cache, source, limit)

    def staged(self, job: Job, splits: Sequence[str], progress: Progress, *, local_rank: int) -> Inputs:
        """These inputs, reading from the node's own disk where cache.stage_to names it.

        Args:
            splits: whose shards to copy.
            local_rank: the node's process 0 copies, the others wait for it.

        Raises:
            CacheError, ResourceError: see cache.staging.stage.
        """
        if self.cache is None or job.cache.stage_to is None:
            return self
        copy = stage(
            self.cache,
            job.cache.stage_to,
            splits,
            progress,
            copies=local_rank == 0,
            verify_checksums=job.cache.verify_checksums,
        )
        return replace(self, cache=copy, source=CachedSource(copy))

    def known(self, split: str, progress: Progress) -> Callable[[Sequence[Record]], KnownImages]:
        """Where keys and grids of a split's images come from: the cache, or the files' headers."""
        cache = self.cache
        if cache is not None:
            return lambda _: KnownImages.of(cache.split(split))
        return lambda records: KnownImages.scan(records, self.processor, self.max_image_pixels, progress)

    def steps(
        self, samples: Samples, config: TrainConfig, *, shuffle: bool, rank: int = 0, world_size: int = 1
    ) -> StepDataset:
        """The samples as optimizer steps."""
        tokens = config.tokens_per_pack
        return StepDataset(
            samples.samples,
            self.source,
            effective_batch_size=config.effective_batch_size,
            tokens_per_pack=DEFAULT_TOKENS_PER_PACK if tokens == "auto" else tokens,
            image_token_id=self.image_token_id,
            merge_size=self.processor.merge_size,
            seed=config.seed if shuffle else None,
            order=config.order,
            share_prefixes=config.share_prefixes,
            blocks=attention_kind(config, training_device(config)) != "sdpa",
            equal_packs=config.fsdp != "none",
            rank=rank,
            world_size=world_size,
        )


def load_tower(job: Job, device: torch.device) -> VisionTower:
    """The vision tower for the live path, on the training device."""
    require_gpu(job.cache.image_processor_device, device)
    return VisionTower.load(job.model, job.cache.model_copy(update={"device": str(device)}))
