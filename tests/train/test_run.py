"""Runs: resuming, stopping, what is logged, and settings that must not change the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache.build import CacheBuilder
from cache.config import ModelConfig
from cache.errors import ConfigError, StoppedError
from cache.progress import Silent
from pipeline.config import PipelineConfig
from train.config import TrainConfig
from train.model import load_language_model
from train.on_device import Feeder
from train.run import run_training
from train.step import Step

from .conftest import Run, job_of, stop_in_step

SETTINGS = {"effective_batch_size": 5, "num_train_epochs": 2, "learning_rate": 3e-3}
STEPS = 16  # 37 rows in steps of 5, two epochs


def _same(a: Run, b: Run) -> bool:
    first, second = a.adapter(), b.adapter()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_interrupted_three_times_is_bit_identical(run_cached: Callable[..., Run]) -> None:
    whole = run_cached("whole", **SETTINGS)
    assert list(whole.losses()) == list(range(1, STEPS + 1))
    for stop_at in (3, 8, 13):  # in the middle of an epoch, at its end, in the middle of the next
        with pytest.raises(StoppedError, match=f"stopped after step {stop_at}"):
            run_cached("parts", stop_at=stop_at, **SETTINGS)
    parts = run_cached("parts", **SETTINGS)
    assert parts.losses() == whole.losses()
    assert _same(parts, whole)


def test_dropout_goes_on_exactly_without_a_generators_state(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    settings = {**SETTINGS, "num_train_epochs": 1, "lora": {"r": 4, "lora_dropout": 0.3}}
    whole = run_cached("whole", **settings)
    with pytest.raises(StoppedError, match="stopped after step 3"):
        run_cached("parts", stop_at=3, **settings)
    (tmp_path / "parts" / "checkpoint-3" / "rng_state.pth").unlink()  # as after going on in other processes
    parts = run_cached("parts", **settings)
    assert parts.losses() == whole.losses()
    assert _same(parts, whole)
    assert run_cached("none", **{**settings, "lora": {"r": 4}}).losses() != whole.losses()


def test_dropout_is_back_after_an_evaluation(run_cached: Callable[..., Run]) -> None:
    settings = {**SETTINGS, "num_train_epochs": 1, "lora": {"r": 4, "lora_dropout": 0.3}}
    without = run_cached("without", **settings)
    between = run_cached("between", **settings, eval_split="val", eval_steps=2)
    assert between.losses() == without.losses()
    assert _same(between, without)


def test_each_step_is_told_the_next_one_so_that_its_features_can_be_copied_early(
    run_cached: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But at an epoch's start, where it is still being read, and at its end; also where it goes on in the middle."""
    told: list[tuple[Step, Step | None]] = []
    packs = Feeder.packs

    def noted(self: Feeder, step: Step, following: Step | None = None) -> Any:
        told.append((step, following))
        return packs(self, step, following)

    monkeypatch.setattr(Feeder, "packs", noted)
    with pytest.raises(StoppedError):
        run_cached("run", stop_at=3, **SETTINGS)
    run_cached("run", **SETTINGS)

    assert len(told) == STEPS
    starts, ends = {0, 3, 8}, {7, 15}
    for number, (_, following) in enumerate(told):
        if number == 2:  # stopped behind it: the next one was there, and is read again
            assert following is not None
        elif number in starts | ends:
            assert following is None
        else:
            assert following is told[number + 1][0]


def test_resume_forgets_half_written_checkpoints_and_lines(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    whole = run_cached("whole", **SETTINGS, save_steps=4)
    crashed = tmp_path / "crashed"
    shutil.copytree(tmp_path / "whole", crashed)
    shutil.rmtree(crashed / "adapter")
    state = json.loads((crashed / "run.json").read_text())
    (crashed / "run.json").write_text(json.dumps({**state, "finished": None}))
    shutil.rmtree(crashed / "checkpoint-16")
    (crashed / "checkpoint-12" / "trainer_state.json").unlink()  # killed while it was written
    with (crashed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    resumed = run_cached("crashed", **SETTINGS, save_steps=4)
    assert _same(resumed, whole)
    assert resumed.losses() == whole.losses()


def test_pack_size_and_checkpointing_do_not_change_the_result(run_cached: Callable[..., Run]) -> None:
    one = run_cached("one", **SETTINGS, tokens_per_pack=10**6)
    many = run_cached("many", **SETTINGS, tokens_per_pack=1)
    recomputed = run_cached("recomputed", **SETTINGS, tokens_per_pack=10**6, gradient_checkpointing=True)
    assert list(many.losses().values()) == pytest.approx(list(one.losses().values()), rel=1e-5)
    assert recomputed.losses() == one.losses()
    for name, tensor in one.adapter().items():
        assert (many.adapter()[name] - tensor).norm() <= 1e-3 * tensor.norm()


def test_cached_and_live_give_the_same_adapter(run_cached: Callable[..., Run]) -> None:
    cached = run_cached("cached", **SETTINGS)
    live = run_cached("live", from_cache=False, **SETTINGS)
    assert cached.losses() == live.losses()
    assert _same(cached, live)


def test_workers_change_nothing(run_cached: Callable[..., Run]) -> None:
    assert _same(run_cached("none", **SETTINGS), run_cached("two", **SETTINGS, dataloader_num_workers=2))


def test_what_auto_takes_is_said(run_cached: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="train")
    run_cached("said", max_steps=1)
    assert "train.attention: auto is sdpa" in caplog.messages
    assert "train.tokens_per_pack: auto is 8192 where there is no GPU" in caplog.messages


def test_every_step_is_logged_with_rates(run_cached: Callable[..., Run]) -> None:
    lines = [line for line in run_cached("run", **SETTINGS).lines() if "samples_per_second" in line]
    assert len(lines) == STEPS
    for line in lines:
        assert {"loss", "learning_rate", "grad_norm", "image_tokens_per_second"} <= line.keys()
        assert line["samples_per_second"] > 0
        assert 0 <= line["data_wait_share"] <= 1
        assert line["peak_memory_gib"] > 0
    assert lines[-1]["seconds_left"] == 0
    assert "seconds_left" not in lines[0]  # of a first step, which warms up, nothing can be told
    assert lines[1]["seconds_left"] > 0


def test_checkpoints_and_evaluations(run_cached: Callable[..., Run], tmp_path: Path) -> None:
    run = run_cached(
        "run",
        **SETTINGS,
        eval_split="val",
        eval_steps=4,
        save_steps=4,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="token_f1",
    )
    evaluations = [line for line in run.lines() if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 12, 16]
    assert all("eval_token_f1" in line for line in evaluations)
    kept = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "run").glob("checkpoint-*"))
    state = json.loads((tmp_path / "run" / f"checkpoint-{kept[-1]}" / "trainer_state.json").read_text())
    best = max(evaluations, key=lambda line: line["eval_token_f1"])["eval_token_f1"]
    assert state["best_metric"] == best
    assert len(kept) <= 2 + 1  # the best one is never removed


def test_another_run_in_the_folder_is_refused(run_cached: Callable[..., Run]) -> None:
    run_cached("run", **SETTINGS)
    with pytest.raises(ConfigError, match=r"train\.learning_rate: 0\.003 there, 0\.1 now"):
        run_cached("run", **{**SETTINGS, "learning_rate": 0.1})
    with pytest.raises(ConfigError, match=r"train\.resume is false"):
        run_cached("run", **SETTINGS, resume=False)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_learns(precision: str, run_cached: Callable[..., Run]) -> None:
    run = run_cached("run", **{**SETTINGS, "precision": precision, "num_train_epochs": 4})
    losses = list(run.losses().values())
    assert losses[-1] < 0.9 * losses[0]
    assert {tensor.dtype for tensor in run.adapter().values()} == {torch.float32}


def test_qlora_quantizes_the_language_model_and_learns(run_cached: Callable[..., Run], tiny: Path) -> None:
    run = run_cached("run", **{**SETTINGS, "quantization": "nf4", "precision": "bf16", "num_train_epochs": 4})
    losses = list(run.losses().values())
    assert losses[-1] < 0.9 * losses[0]
    config = TrainConfig(quantization="nf4", precision="bf16")
    model = load_language_model(ModelConfig(name_or_path=str(tiny)), config, torch.device("cpu"))
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if "proj" in name}
    assert len(kinds) == 4 * 7
    assert set(kinds.values()) == {"Linear4bit"}
    assert type(model.lm_head) is torch.nn.Linear


def test_rows_that_changed_under_a_run_are_refused(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    rows = tmp_path / "train.jsonl"
    whole = (data_dir / "train.jsonl").read_text()
    rows.write_text(whole)
    data = {"splits": {"train": str(rows)}, "image_root": str(data_dir)}
    config = make_config({}, data=data, train={"max_steps": 3, "eval_split": None})
    CacheBuilder(config.model, config.data, config.cache, config.cache_dir).run("train", Silent())
    with pytest.raises(StoppedError, match="after step 2"):
        run_training(job_of(config), Silent(), stop_in_step(config.output_dir, 2))

    rows.write_text("".join(whole.splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match=r"(?s)rows of the training split have changed.*another output_dir"):
        run_training(job_of(config), Silent())

    rows.write_text(whole)
    run_training(job_of(config), Silent())
    assert list(Run(config.output_dir).losses()) == [1, 2, 3]


def test_settings_of_the_data_belong_to_the_run(
    data_dir: Path, make_config: Callable[..., PipelineConfig], tmp_path: Path
) -> None:
    path = str(data_dir / "train.jsonl")

    def settings(**data: object) -> dict[str, Any]:
        config = make_config({"train": path}, output_dir=str(tmp_path))
        return job_of(config.model_copy(update={"data": config.data.model_copy(update=data)})).settings()

    assert settings() == settings(max_bad_share=0.5)
    assert settings() != settings(stage_format="## {stage}\n{target}")
    assert settings() != settings(max_length=100)
    assert settings() != settings(on_bad_record="report")
