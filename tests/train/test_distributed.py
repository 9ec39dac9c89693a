"""Several processes on the CPU (gloo): the same steps, the same losses, the same adapter, whatever their number.

Bounds, in fp32: a loss to 1e-5 of itself, a tensor of the adapter to 1e-3 of its norm. Sums are added up in another
order where samples are divided otherwise; going on in the same number of processes is bit-identical.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from cache.build import CacheBuilder
from cache.progress import Silent
from pipeline.config_file import load_config

from .processes import Outcome, Stop, train

pytestmark = pytest.mark.timeout(900)

BIN = Path(sys.executable).parent
STEPS = 8
SETTINGS = {
    # 37 rows in steps of 6: the last step of an epoch holds one row, less than there are processes.
    "effective_batch_size": 6,
    "max_steps": STEPS,
    "learning_rate": 3e-3,
    "tokens_per_pack": 100,
    "eval_split": "val",
    "eval_steps": 4,
    "save_steps": 100,
    "metric_for_best_model": "token_f1",  # so that evaluations generate
}


@dataclass(frozen=True)
class Case:
    """A cached dataset and the run of one process that others are compared with."""

    config: Path
    folder: Path
    alone: Outcome

    def run(self, name: str, count: int, *settings: str, stop: Stop | None = None) -> Outcome:
        return train(self.config, self.folder / name, count, *settings, stop=stop)

    def go_on(self, stopped: Outcome, count: int, *settings: str) -> Outcome:
        folder = self.folder / f"{stopped.folder.name}-on-{count}"
        shutil.copytree(stopped.folder, folder)
        outcome = train(self.config, folder, count, *settings)
        before = stopped.losses()
        assert {step: loss for step, loss in outcome.losses().items() if step in before} == before
        return outcome


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny: Path, data_dir: Path) -> Case:
    folder = tmp_path_factory.mktemp("distributed")
    config = folder / "my.yaml"
    content = {
        "model": str(tiny),
        "data": {"splits": {"train": str(data_dir / "train.jsonl"), "val": str(data_dir / "val.jsonl")}},
        "output_dir": str(folder / "run"),
        "cache": {"dir": str(folder / "features"), "max_pixels": 128 * 128, "dtype": "float32", "num_workers": 0},
        "train": {
            "precision": "fp32",
            "dataloader_num_workers": 0,
            "report_to": ["none"],
            "lora": {"r": 4},
            **SETTINGS,
        },
        "eval": {"max_new_tokens": 4},
    }
    config.write_text(yaml.safe_dump(content))
    loaded = load_config(config)
    for split in ("train", "val"):
        CacheBuilder(loaded.model, loaded.data, loaded.cache, loaded.cache_dir).run(split, Silent())
    alone = train(config, folder / "alone", 1)
    assert alone.codes == [0], alone.said
    assert list(alone.losses()) == list(range(1, STEPS + 1))
    return Case(config, folder, alone)


def _assert_same_curve(outcome: Outcome, alone: Outcome) -> None:
    assert outcome.codes == [0] * len(outcome.codes), outcome.said
    wanted = alone.losses()
    assert list(outcome.losses()) == list(wanted)
    assert list(outcome.losses().values()) == pytest.approx(list(wanted.values()), rel=1e-5)
    evaluations = alone.evaluations()
    assert [step for step, _, _ in outcome.evaluations()] == [step for step, _, _ in evaluations] == [4, STEPS]
    for (_, loss, score), (_, wanted_loss, wanted_score) in zip(outcome.evaluations(), evaluations, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert score == wanted_score
    adapter = outcome.adapter()
    assert adapter.keys() == alone.adapter().keys()
    for name, tensor in alone.adapter().items():
        assert (adapter[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-7, name


@pytest.fixture(scope="module")
def two(case: Case) -> Outcome:
    return case.run("two", 2)


def test_two_processes_learn_what_one_learns(case: Case, two: Outcome) -> None:
    _assert_same_curve(two, case.alone)


def test_four_processes_learn_what_one_learns(case: Case) -> None:
    _assert_same_curve(case.run("four", 4), case.alone)


@pytest.fixture(scope="module")
def interrupted(case: Case) -> Outcome:
    """Two processes of which one got a signal in the middle of the first epoch."""
    outcome = case.run("interrupted", 2, stop=Stop(rank=1, lines=2))
    assert outcome.codes == [130, 138], outcome.said
    assert 2 <= max(outcome.losses()) < STEPS
    assert "stopped after step" in outcome.said[0]
    return outcome


@pytest.mark.parametrize("count", [1, 4])
def test_a_stopped_run_goes_on_in_another_number_of_processes(case: Case, interrupted: Outcome, count: int) -> None:
    _assert_same_curve(case.go_on(interrupted, count), case.alone)


def test_going_on_in_as_many_processes_is_bit_identical(case: Case, two: Outcome, interrupted: Outcome) -> None:
    outcome = case.go_on(interrupted, 2)
    assert outcome.codes == [0, 0], outcome.said
    assert outcome.losses() == two.losses()
    assert all(torch.equal(tensor, outcome.adapter()[name]) for name, tensor in two.adapter().items())


DIVIDED = ["train.fsdp=full_shard", "train.gradient_checkpointing=true"]


@pytest.fixture(scope="module")
def divided(case: Case) -> Outcome:
    """Two processes with a part of the base each, of which one got a signal."""
    outcome = case.run("divided", 2, *DIVIDED, stop=Stop(rank=0, lines=2))
    assert outcome.codes == [138, 130], outcome.said
    return outcome


def test_a_divided_base_learns_what_a_whole_one_learns(case: Case, divided: Outcome) -> None:
    _assert_same_curve(case.go_on(divided, 2, *DIVIDED), case.alone)
    _assert_same_curve(case.go_on(divided, 1), case.alone)  # whole again


def test_a_divided_base_goes_on_in_more_parts(case: Case, divided: Outcome) -> None:
    _assert_same_curve(case.go_on(divided, 4, *DIVIDED), case.alone)


def test_torchrun_starts_and_ends_cleanly(case: Case) -> None:
    """With workers in each process, as users run it."""
    command = [BIN / "torchrun", "--standalone", "--nproc_per_node=2", "--no-python", BIN / "pipeline", "train"]
    settings = [f"output_dir={case.folder / 'torchrun'}", "train.dataloader_num_workers=2"]
    done = subprocess.run(
        [*command, "--config", case.config, "--from-cache", *(f"--set={setting}" for setting in settings)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "destroy_process_group" not in done.stderr
    _assert_same_curve(Outcome([0], case.folder / "torchrun", [done.stderr]), case.alone)
