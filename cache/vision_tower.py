"""Loads `model.visual` alone and runs it. The language model's weights are never read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache import flash
from cache.checkpoint import VisionWeights, load_hf_config
from cache.config import CacheConfig, ModelConfig
from cache.errors import ConfigError, ResourceError
from cache.fast_tower import FastTower
from cache.features import VisionFeatures
from cache.positions import Grids, Positions

_DEVICES = "use auto, cpu, cuda or cuda:N"


class VisionTower:
    """The frozen vision tower of a checkpoint.

    Args:
        module: the stock transformers vision model.
        fast: what runs instead of the module (see CacheConfig.tower); then all images of a batch must have one shape.
    """

    def __init__(self, module: torch.nn.Module, *, fast: FastTower | None = None) -> None:
        self.module = module.eval().requires_grad_(False)
        self._fast = fast
        parameter = next(module.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._positions = Positions(module, self.device)
        self._merge_unit = int(module.config.spatial_merge_size) ** 2  # type: ignore[union-attr,arg-type]

    @classmethod
    def load(cls, model: ModelConfig, cache: CacheConfig, *, weights: VisionWeights | None = None) -> VisionTower:
        """Build the stock vision model and fill it from the checkpoint, tensor by tensor.

        Raises:
            ConfigError: tensors are missing or have other shapes than the config says; the device or the attention
                implementation is not there.
        """
        device = resolve_device(cache.device)
        if cache.tower == "fast":
            _require_fast(cache, device)
        module = _build(model, cache)
        _fill(module, weights or VisionWeights.find(model), model)
        module.to(device).eval().requires_grad_(False)
        return cls(module, fast=_fast(module, cache) if cache.tower == "fast" else None)

    @torch.no_grad()
    def encode(self, pixel_values: Sequence[torch.Tensor], grids: Sequence[torch.Tensor]) -> list[VisionFeatures]:
        """Run the tower over some images at once.

        On a GPU it returns as soon as the work is queued there; nothing in it waits for the device.

        Args:
            pixel_values: per image (P, C * T * patch * patch), any float dtype, on any device.
            grids: per image (3,) int64, on the CPU.

        Returns:
            Per image its features, on the tower's device and in its dtype; the grids are the given ones.

        Raises:
            ResourceError: the device's memory does not suffice.
        """
        shapes = tuple((int(t), int(h), int(w)) for t, h, w in (grid.tolist() for grid in grids))
        try:
            # In two steps: in one, the host would convert before it sends.
            sent = [p.to(self.device, non_blocking=True) for p in pixel_values]
            output = self._run(torch.cat(sent).to(self.dtype), shapes)
        except RuntimeError as error:
            # On the CPU torch raises a plain RuntimeError.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            patches = sum(p.shape[0] for p in pixel_values)
            raise ResourceError(
                f"the vision tower ran out of memory on {len(grids)} image(s) of {patches} patches",
                do="lower cache.max_pixels, or use a device with more memory",
            ) from error
        sizes = [int(g.prod()) // self._merge_unit for g in grids]
        embeds = output.pooler_output.split(sizes)
        levels = [level.split(sizes) for level in output.deepstack_features]
        return [
            VisionFeatures(embeds[i], torch.stack([level[i] for level in levels]), grid.to("cpu", torch.int64))
            for i, grid in enumerate(grids)
        ]

    def _run(self, pixels: torch.Tensor, grids: Grids) -> Any:
        positions = self._positions.of(grids)
        if self._fast is not None:
            return self._fast(pixels, grids, positions)
        return self.module(pixels, **positions, return_dict=True)


def _fast(module: torch.nn.Module, cache: CacheConfig) -> FastTower:
    by_flash = cache.attn_implementation == "flash_attention_4"
    return FastTower(module, flash=by_flash, compile_first=cache.patches_per_batch is None)


def _require_fast(cache: CacheConfig, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError("cache.tower: fast needs a GPU", do="set cache.tower: stock")
    if cache.attn_implementation != "flash_attention_4":
        return
    setting = f"cache.attn_implementation: {cache.attn_implementation}"
    flash.require_hopper(setting, device, otherwise="sdpa")
    flash.require_installed(setting, otherwise="sdpa")
    flash.require_kernels(setting)


def _build(model: ModelConfig, cache: CacheConfig) -> torch.nn.Module:
    """The stock vision model with whatever its memory holds for weights."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    config = load_hf_config(model)
    try:
        with no_init_weights():
            module: torch.nn.Module = AutoModel.from_config(
                config.vision_config,
                dtype=getattr(torch, cache.dtype),
                # The fast tower takes the weights alone from it.
                attn_implementation="sdpa" if cache.tower == "fast" else cache.attn_implementation,
                trust_remote_code=False,
            )
    except ImportError as error:
        raise ConfigError(
            str(error).strip().split("\n", 1)[0],
            where=f"cache.attn_implementation: {cache.attn_implementation}",
            do="install what it needs, or use sdpa",
        ) from error
    except (ValueError, TypeError, KeyError, ArithmeticError, RuntimeError) as error:
        raise ConfigError(
            f"no vision tower can be built from vision_config: {type(error).__name__}: {error}",
            where=model.name_or_path,
            do="copy or download the checkpoint again",
        ) from error
    return module


def resolve_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu.

    Raises:
        ConfigError: the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not one that torch knows", do=_DEVICES) from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device {name!r} is not one that the vision tower runs on", do=_DEVICES)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} is not there; {torch.cuda.device_count()} GPUs are visible", do="use auto")
    return device


def _fill(module: torch.nn.Module, weights: VisionWeights, model: ModelConfig) -> None:
    targets = dict(module.named_parameters()) | {
        name: buffer for name, buffer in module.named_buffers() if name in weights.files
    }
    missing = targets.keys() - weights.files.keys()
    if missing:
        raise ConfigError(
            f"the checkpoint lacks {len(missing)} tower tensors, e.g. {min(missing)}",
            where=model.name_or_path,
            do="copy or download the checkpoint again",
        )
    with torch.no_grad():
        for name, tensor in weights.tensors():
            wanted = tuple(targets[name].shape) if name in targets else "no such tensor"
            if wanted != tuple(tensor.shape):
                raise ConfigError(
                    f"tower tensor {name} is {tuple(tensor.shape)}; by the config it is {wanted}",
                    where=model.name_or_path,
                    do="copy or download the checkpoint again",
                )
            targets[name].copy_(tensor)
