"""FSDP for a model that does not fit one GPU: the frozen base is divided among processes, the adapter is whole in each.

Each process reads only its part of the checkpoint. A decoder layer is put together when it is needed and let go behind.
What is trained is the same small adapter everywhere, so checkpoints and the saved adapter are those of any other run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

from cache.errors import ConfigError
from train.config import TrainConfig

PLAN = {"model.language_model.layers.*": "free_full_weight"}


def is_sharded(config: TrainConfig) -> bool:
    """Whether the base is divided in this process; one process alone has nobody to share with."""
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    return config.fsdp == "full_shard" and several


def loading_arguments(config: TrainConfig) -> dict[str, Any]:
    """What `from_pretrained` takes to give each process its part.

    Raises:
        ConfigError: this version of transformers does not load in parts.
    """
    if not is_sharded(config):
        return {}
    from transformers import Trainer

    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        known = False
    else:
        known = "fsdp_plan" in inspect.signature(DistributedConfig).parameters
    if not (known and hasattr(Trainer, "_sync_replicated_trainable_parameters")):
        raise ConfigError("train.fsdp needs transformers 5.23 or newer", do="pip install -U transformers")
    return {"distributed_config": DistributedConfig(fsdp_size=distributed.get_world_size())}


def gather_in_forward(model: Any) -> None:
    """Let the stock model's embedding and head be put together for its `forward`, which PEFT calls directly."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, "forward")


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace the gradients by their mean over all processes, in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    distributed.all_reduce(together)
    together /= distributed.get_world_size()
    parts = together.split([gradient.numel() for gradient in gradients])  # type: ignore[no-untyped-call]
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])
