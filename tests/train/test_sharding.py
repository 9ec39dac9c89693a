"""Settings of FSDP that contradict each other, or that one process alone can ignore."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from train.config import TrainConfig
from train.sharding import is_sharded, loading_arguments


@pytest.mark.parametrize("quantization", ["nf4", "fp8"])
def test_a_quantized_base_cannot_be_divided(quantization: str) -> None:
    with pytest.raises(ValidationError, match=f"cannot divide a base in {quantization}"):
        TrainConfig.model_validate({"fsdp": "full_shard", "quantization": quantization})


def test_one_process_alone_has_the_whole_base() -> None:
    config = TrainConfig(fsdp="full_shard")
    assert not is_sharded(config)
    assert loading_arguments(config) == {}
