"""Which GPUs this process may hand on to its children."""

from __future__ import annotations

import os


def visible_gpus() -> list[str]:
    """Their names for CUDA_VISIBLE_DEVICES: as listed there, where a scheduler has listed them, else by number.

    Where there is no real GPU the list stands as it is: a cluster of tests hands out GPUs that do not exist.
    """
    import torch

    there = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(number) for number in range(there)]
    names = [name.strip() for name in listed.split(",") if name.strip()]
    # What CUDA and SLURM write for none at all; CUDA ends the list at the first of them.
    none = next((place for place, name in enumerate(names) if name in {"-1", "NoDevFiles"}), len(names))
    return names[: min(none, there or none)]


def environment_of(gpu: str) -> dict[str, str]:
    """The environment of a child that sees this GPU only; an empty name hides all."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
