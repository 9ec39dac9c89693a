"""A saved adapter's folder: whether it holds one, and what its weights are known by."""

from __future__ import annotations

from pathlib import Path

import xxhash

from cache.errors import ConfigError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
NO_ADAPTER = "train first, or name the adapter's folder with --adapter; --base leaves it out"


def require_adapter(adapter: Path, advice: str) -> None:
    """Check that a folder holds an adapter.

    Raises:
        ConfigError: it does not, or its weights are a pickle; `advice` says what to do.
    """
    if not (adapter / CONFIG_FILE).is_file():
        raise ConfigError(f"there is no adapter here (no {CONFIG_FILE})", where=str(adapter), do=advice)
    if not (adapter / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"the adapter has no {WEIGHTS_FILE}; pickled weights are not read",
            where=str(adapter),
            do="save it again with safetensors",
        )


def adapter_digest(adapter: Path) -> str:
    """What an adapter's weights are known by in a run folder; says so where there are none (yet)."""
    digest = xxhash.xxh3_128()
    try:
        with (adapter / WEIGHTS_FILE).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        return f"{adapter} ({error.strerror})"
    return f"xxh3:{digest.hexdigest()}"
