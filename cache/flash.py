"""FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), an extra, for Hopper GPUs."""

from __future__ import annotations

import importlib.metadata

import torch

from cache.errors import ConfigError

PACKAGE, VERSION = "flash-attn-4", "4.0.0b36"
INSTALL = f"pip install '{PACKAGE}[cu13]=={VERSION}'"  # as the extra `flash` does, wherever this project came from
_CAPABILITY = (9, 0)


def is_installed() -> bool:
    """Whether the version is there whose inner functions are called."""
    return _installed_version() == VERSION


def require_installed(setting: str, *, otherwise: str) -> None:
    """Check that, without importing it.

    Args:
        setting: what asks for it, for the message.
        otherwise: what else to set.

    Raises:
        ConfigError: it is not there, or another version is.
    """
    if is_installed():
        return
    there = _installed_version()
    raise ConfigError(
        f"{setting} needs the package {PACKAGE} {VERSION}{f'; {there} is installed' if there else ''}",
        do=f"{INSTALL}, or use {otherwise}",
    )


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def runs_on(device: torch.device) -> bool:
    """Whether the kernels were tried on GPUs of this kind."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == _CAPABILITY


def require_hopper(setting: str, device: torch.device, *, otherwise: str) -> None:
    """Check the GPU; arguments as for `require_installed`.

    Raises:
        ConfigError: it is of another kind.
    """
    if not runs_on(device):
        raise ConfigError(
            f"{setting} needs a Hopper GPU (H100, H200); this is {torch.cuda.get_device_name(device)}",
            do=f"use {otherwise}",
        )


def require_kernels(setting: str) -> None:
    """Import the library, which takes seconds.

    Args:
        setting: what asks for it, for the message.

    Raises:
        ConfigError: it is installed, but not whole.
    """
    try:
        import flash_attn.cute.interface  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"flash-attn-4 is installed but cannot be imported: {error}", where=setting, do=INSTALL
        ) from error


# An operator of its own: the compiler neither looks into it nor breaks its graph at it.
@torch.library.custom_op("vision_once::flash", mutates_args=())
def flash_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Everyone sees everyone. (images, S, heads, head_dim) each, bfloat16 or float16, and so is the result."""
    from flash_attn.cute.interface import _flash_attn_fwd

    with torch.cuda.device(query.device):  # it takes the stream of the current GPU, wherever the tensors are
        attended: torch.Tensor = _flash_attn_fwd(query, key, value)[0]
    return attended


@flash_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    del key, value
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
