"""Which implementation of the image processor runs, and on what: whether what is asked for is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.errors import ConfigError

if TYPE_CHECKING:
    import torch


def available_backend(asked: str, device: str) -> str:
    """Find the backend to load, "pil" or "torchvision".

    Args:
        asked: cache.image_processor_backend; "auto" is torchvision where it is installed.
        device: cache.image_processor_device.

    Raises:
        ConfigError: torchvision is needed and not installed, or PIL is asked for on a GPU.
    """
    from transformers.utils import is_torchvision_available

    available = is_torchvision_available()
    if device != "cpu" and (asked == "pil" or not available):
        raise ConfigError(
            "PIL cannot resize images on a GPU" if asked == "pil" else "torchvision is not installed",
            where=f"cache.image_processor_device: {device}, cache.image_processor_backend: {asked}",
            do="set the backend to torchvision and install the build of it that belongs to the installed torch; or set "
            "cache.image_processor_device: cpu",
        )
    if asked == "auto":
        return "torchvision" if available else "pil"
    if asked == "torchvision" and not available:
        raise ConfigError(
            "torchvision is not installed",
            where="cache.image_processor_backend: torchvision",
            do="pip install torchvision, in the build that belongs to the installed torch; or set pil or auto",
        )
    return asked


def require_gpu(asked: str, device: torch.device) -> None:
    """Refuse images to be resized on a GPU for a tower that is on none.

    Args:
        asked: cache.image_processor_device.
        device: the tower's.

    Raises:
        ConfigError: names both.
    """
    if asked != "cpu" and device.type != "cuda":
        raise ConfigError(
            f"images are to be resized on a GPU, and the vision tower runs on {device}",
            where=f"cache.image_processor_device: {asked}",
            do="run it where there is a GPU, with cache.device: auto; or set cache.image_processor_device: cpu, whose "
            "features differ in the last bits and make a cache of their own",
        )


def any_gpu() -> torch.device:
    """The current GPU.

    Raises:
        ConfigError: there is none.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_gpu("cuda", device)
    return device
