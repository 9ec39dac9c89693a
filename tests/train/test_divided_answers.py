"""Answers of an evaluation in several processes: each gives its share, all score the answers of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.evaluate import Evaluator
from train.held_out import HeldOut
from train.inputs import Inputs
from train.model import load_language_model

from .conftest import job_of

PROCESSES = 3


class _Counting(Silent):
    """How many samples are answered."""

    answered = 0

    def advance(self, count: int = 1) -> None:
        """See Progress."""
        self.answered += count


def test_processes_divide_the_answers_and_agree_on_the_scores(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process after the other; the exchange, played here, is a real one in test_distributed."""
    config = make_config(
        {"val": str(data_dir / "val.jsonl")},
        cache={"dir": str(tmp_path / "features")},
        eval={"batch_size": 2, "max_new_tokens": 3},
    )
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("val", Silent())
    inputs = Inputs.open(job_of(config))
    prompts = HeldOut.read(inputs, "val", Silent(), answers=True, limit=None).prompts
    model = load_language_model(config.model, config.train, torch.device("cpu"))
    evaluator = Evaluator(inputs.samples.encoder, inputs.source, inputs.processor.merge_size, config.eval)
    shares: dict[int, dict[int, str]] = {}
    progress = _Counting()
    alone = evaluator.run(model, prompts, progress)
    whole = progress.answered

    def hand_in(rank: int) -> None:
        def exchange(_: list[dict[int, str]], own: dict[int, str]) -> None:
            shares[rank] = own
            raise InterruptedError

        monkeypatch.setattr(torch.distributed, "all_gather_object", exchange)
        with pytest.raises(InterruptedError):
            evaluator.run(model, prompts, Silent(), rank=rank, world_size=PROCESSES)

    for rank in range(PROCESSES - 1):
        hand_in(rank)

    def exchange(found: list[dict[int, str]], own: dict[int, str]) -> None:
        found[:] = [*shares.values(), own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", exchange)
    progress = _Counting()
    together = evaluator.run(model, prompts, progress, rank=PROCESSES - 1, world_size=PROCESSES)

    assert together == alone
    answered = [*map(len, shares.values()), progress.answered]
    assert sum(answered) == whole == len(prompts.samples)
    assert max(answered) - min(answered) <= config.eval.batch_size
