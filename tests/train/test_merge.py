"""Merging: the stock class loads the result, and the Hub client gets exactly that folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import PeftModel
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from cache.config import ModelConfig
from cache.errors import ConfigError
from train.config import TrainConfig
from train.merge import merge

from .conftest import Run

CONFIG = TrainConfig(precision="fp32")


@pytest.fixture
def adapter(run_cached: Callable[..., Run]) -> Path:
    return run_cached("run", effective_batch_size=10, num_train_epochs=2, learning_rate=1e-2).folder / "adapter"


def test_merged_checkpoint_is_the_adapted_model(
    adapter: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda name, **kw: calls.append((name, kw)))
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **kw: calls.append(("upload", kw)))
    model = ModelConfig(name_or_path=str(tiny))
    merged = merge(model, CONFIG, adapter=adapter, output=tmp_path / "merged", push_to_hub="me/mine")
    assert calls == [
        ("me/mine", {"exist_ok": True, "private": True}),
        ("upload", {"repo_id": "me/mine", "folder_path": str(tmp_path / "merged")}),
    ]

    stock = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    base = AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
    tower, before = stock.model.visual.state_dict(), base.model.visual.state_dict()
    assert all(torch.equal(tower[name], before[name]) for name in before)
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, adapter)(input_ids=ids).logits
        got = stock(input_ids=ids).logits
    torch.testing.assert_close(got, adapted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, plain, atol=1e-2)
    assert AutoTokenizer.from_pretrained(merged).chat_template == AutoTokenizer.from_pretrained(tiny).chat_template
    assert AutoImageProcessor.from_pretrained(merged).to_dict() == AutoImageProcessor.from_pretrained(tiny).to_dict()

    with pytest.raises(ConfigError, match="exists already"):
        merge(model, CONFIG, adapter=adapter, output=tmp_path / "merged", push_to_hub=None)
