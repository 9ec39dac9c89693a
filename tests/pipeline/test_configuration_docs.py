"""docs/configuration.md says what the settings' docstrings say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from cache.config import CacheConfig, DataConfig, ModelConfig, SplitConfig
from pipeline.config import PipelineConfig
from pipeline.config_errors import all_keys
from pipeline.configuration_docs import render
from train.config import EvalConfig, LoraConfig, TrainConfig

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
SECTIONS = [
    PipelineConfig,
    ModelConfig,
    DataConfig,
    SplitConfig,
    CacheConfig,
    TrainConfig,
    LoraConfig,
    EvalConfig,
]


def test_the_committed_document_is_what_is_rendered() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(), "run `make docs`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_described(section: type[BaseModel]) -> None:
    assert section.__doc__
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def test_every_setting_has_a_row() -> None:
    document = render()

    missing = [key for key in all_keys(PipelineConfig) if f"| `{key}` |" not in document]

    assert missing == []
    assert "| `data.splits.NAME.image_root` |" in document


def test_types_are_in_the_words_of_yaml() -> None:
    document = render()

    assert "<class" not in document
    assert "typing" not in document
    assert "| `train.lora.target_modules` | `all-linear` or list of text | `all-linear` |" in document
    assert "| `cache.max_pixels` | whole number or null | `null` |" in document
    assert "| `output_dir` | path | must be given |" in document


@pytest.mark.parametrize("code", ["0", "1", "2", "3", "4", "5", "128 + n"])
def test_every_exit_code_is_explained(code: str) -> None:
    assert f"\n| {code} | " in render()
