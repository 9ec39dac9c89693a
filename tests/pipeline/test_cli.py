"""The whole small job as a user types it: every verb, every dataset format, dry runs, wrong options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pipeline.cli import app
from pipeline.config_file import load_config

# A change here is a change of what users' scripts rely on: it belongs into the change log.
VERBS = """\
cache: --config -c --split --set -s --dry-run --num-parts --part --gpus --repair
cancel: --config -c --set -s
check: --config -c --split --set -s
compare: --config -c --split --set -s
demo: --output
eval: --config -c --split --adapter --base --live --experiment --stage --set -s
experiments: --config -c --gpus --experiment --split --set -s --dry-run
merge: --config -c --output --adapter --push-to-hub --experiment --stage --set -s
plan: --config -c --split --images-per-second --samples-per-second --time-limit --calibrate --calibration-steps --json --set -s
predict: --prompt --image --config -c --model --adapter --base --system --experiment --stage --set -s
prune: --config -c --fingerprint --leftovers --yes --dry-run --set -s
repack: --config -c --format --shard-size --dtype --output --set -s
status: --config -c --set -s
submit: --config -c --dry-run --set -s
train: --config -c --from-cache --experiment --stage --set -s --dry-run
verify: --config -c --split --against-live --images --records --adapter --set -s
"""  # noqa: E501
FORMATS = {
    "flat": "train.jsonl",
    "qwen": "qwen_finetune.json",
    "sharegpt": "sharegpt.json",
    "messages": "messages.jsonl",
    "stages": "stages.jsonl",
}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all tests here: what one has encoded the next one finds."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that several tests read."""
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def sample_config(write_config: Callable[..., Path], data_dir: Path, shared_cache: Path) -> Callable[..., Path]:
    """my.yaml over a file of the sample data as train, the flat one as val."""

    def write(file: str = "train.jsonl", **sections: Any) -> Path:
        splits = {"train": str(data_dir / file), "val": str(data_dir / "val.jsonl")}
        cache = {"dir": str(shared_cache), **sections.pop("cache", {})}
        return write_config(splits, cache=cache, **sections)

    return write


@pytest.fixture
def finished_run(run: Callable[..., Any], sample_config: Callable[..., Path], finished_folder: Path) -> Path:
    """A run for the verbs that come after training; whichever test asks first makes it."""
    if not (finished_folder / "adapter").exists():
        config = sample_config(output_dir=str(finished_folder), train={"max_steps": 2, "eval_split": None})
        for verb in (("cache", "--split", "train"), ("train", "--from-cache")):
            assert run(*verb, "--config", config).code == 0
    return finished_folder


def test_the_verbs_and_their_options_are_those_that_scripts_rely_on() -> None:
    command: Any = typer.main.get_command(app)
    lines = []
    for name in sorted(command.commands):
        options = [option for parameter in command.commands[name].params for option in parameter.opts]
        lines.append(f"{name}: {' '.join(option for option in options if option != '--help')}\n")

    assert "".join(lines) == VERBS


@pytest.mark.parametrize("line", VERBS.splitlines())
def test_help_explains_every_option(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    verb, _, options = line.partition(":")

    result = run(verb, "--help")

    assert result.code == 0
    assert [option for option in options.split() if option not in result.out] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["cache"], "Missing option '--config'"),
        (["cache", "--config", "a.yaml"], "Missing option '--split'"),
        (["train", "--config", "a.yaml", "--form-cache"], "No such option: --form-cache"),
        (["train", "--config"], "requires an argument"),
        (["train", "--config", "a.yaml", "extra"], "extra"),
        (["predict", "--prompt", "x"], "predict needs either --config or --model"),
        (["predict", "--prompt", "x", "--model", "m", "--config", "a.yaml"], "predict needs either"),
        (["train", "--config", "missing.yaml"], "missing.yaml: there is no such config file"),
    ],
)
def test_a_wrong_command_line_exits_with_2(run: Callable[..., Any], arguments: list[str], message: str) -> None:
    result = run(*arguments)

    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_without_a_verb_the_help_is_shown(run: Callable[..., Any]) -> None:
    result = run()

    assert result.code == 2
    assert "cache: run the tower, store its output" in result.out + result.err


def test_cache_train_eval(run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = sample_config(output_dir=str(folder), train={"max_steps": 2, "report_to": ["tensorboard"]})

    first = run("cache", "--config", config, "--split", "train")
    assert (first.code, "split train: 37 records, 8 distinct images" in first.out) == (0, True), first.err
    again = run("cache", "--config", config, "--split", "train")
    assert (again.code, "encoded now      0 images" in again.out) == (0, True)
    assert run("cache", "--config", config, "--split", "val").code == 0

    trained = run("train", "--config", config, "--from-cache")
    assert trained.code == 0, trained.err
    assert trained.out == f"adapter saved in {folder / 'adapter'}\n"
    assert load_config(folder / "config.yaml") == load_config(config)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {"loss", "learning_rate", "grad_norm", "samples_per_second", "image_tokens_per_second"}
    assert names | {"data_wait_share", "peak_memory_gib", "seconds_left"} <= set(steps[1])
    assert any("eval_loss" in step for step in steps)
    finished = run("train", "--config", config, "--from-cache")
    assert (finished.code, "already finished: " in finished.out) == (0, True)

    evaluated = run("eval", "--config", config, "--set", "eval.limit=2")
    assert evaluated.code == 0, evaluated.err
    predictions = (folder / "eval-val" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(predictions) == 2
    assert {"id", "question", "answer", "prediction", "exact_match"} <= set(json.loads(predictions[0]))
    scores = json.loads((folder / "eval-val" / "metrics.json").read_text())
    assert {"loss", "exact_match", "token_f1"} <= set(scores)
    assert run("eval", "--config", config, "--set", "eval.limit=1").code == 0
    fewer = json.loads((folder / "eval-val" / "metrics.json").read_text())
    assert fewer["loss"] != scores["loss"]  # of the same samples as the answers


@pytest.mark.parametrize("name", ["qwen", "sharegpt", "messages", "stages"])
def test_every_dataset_format_goes_through_cache_and_train(
    run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    config = sample_config(FORMATS[name], train={"max_steps": 2, "eval_split": None})

    cached = run("cache", "--config", config, "--split", "train")
    trained = run("train", "--config", config, "--from-cache")

    assert cached.code == 0, cached.err
    assert trained.code == 0, trained.err
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_training_live_goes_by_the_same_samples(
    run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path
) -> None:
    losses = {}
    for name, flags in (("cached", ["--from-cache"]), ("live", [])):
        folder = tmp_path / name
        config = sample_config("stages.jsonl", output_dir=str(folder), train={"max_steps": 1, "eval_split": None})
        assert run("cache", "--config", config, "--split", "train").code == 0
        result = run("train", "--config", config, *flags)
        assert result.code == 0, result.err
        losses[name] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]

    assert losses["cached"] == losses["live"]


def test_predict_with_and_without_an_image(
    run: Callable[..., Any], sample_config: Callable[..., Path], finished_run: Path, data_dir: Path, tiny: Path
) -> None:
    config = sample_config(output_dir=str(finished_run))
    image = data_dir / "images" / "lounge.jpg"

    with_adapter = run("predict", "--config", config, "--image", image, "--prompt", "How many chairs?")
    base = run("predict", "--config", config, "--image", image, "--prompt", "Here <image> what?", "--base")
    short = ["--set", "eval.max_new_tokens=3", "--system", "Brief."]
    text = run("predict", "--model", tiny, "--base", "--prompt", "Hello", *short)

    assert (with_adapter.code, base.code, text.code) == (0, 0, 0), with_adapter.err + base.err + text.err
    assert "Traceback" not in with_adapter.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--base", "--image", "none.png", "--prompt", "What?"], 3, "none.png: there is no such image file"),
        (["--base", "--prompt", "<image> What?"], 2, "the prompt says <image> 1 times, and 0 images were given"),
        (["--prompt", "What?", "--adapter", "nowhere"], 2, "nowhere: there is no adapter here"),
        (["--prompt", "What?"], 2, "--model alone names no adapter"),
        (["--prompt", "What?", "--adapter", "nowhere", "--base"], 2, "--base and --adapter exclude each other"),
    ],
)
def test_predict_refuses(run: Callable[..., Any], tiny: Path, arguments: list[str], code: int, message: str) -> None:
    result = run("predict", "--model", tiny, *arguments)

    assert (result.code, message in result.err) == (code, True), result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("verb", [["predict", "--prompt", "What?"], ["eval"]])
def test_without_an_adapter_the_bare_model_is_not_asked_silently(
    run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path, verb: list[str]
) -> None:
    result = run(*verb, "--config", sample_config(output_dir=str(tmp_path / "untrained")))

    result.check_refusal(2, "untrained/adapter: there is no adapter here", "--base leaves it out")


def test_merge_gives_a_checkpoint_for_the_stock_class(
    run: Callable[..., Any], sample_config: Callable[..., Path], finished_run: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    config, target = sample_config(output_dir=str(finished_run)), tmp_path / "merged"

    result = run("merge", "--config", config, "--output", target)
    assert result.code == 0, result.err
    assert result.out == f"{target}\n"
    model, report = AutoModelForImageTextToText.from_pretrained(target, output_loading_info=True)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(target).chat_template

    twice = run("merge", "--config", config, "--output", target)
    assert (twice.code, "exists already" in twice.err) == (2, True)


def test_dry_runs_spend_nothing(
    run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a dry run loads no model")

    monkeypatch.setattr("train.run.load_language_model", refuse)
    monkeypatch.setattr("cache.vision_tower.VisionTower.load", refuse)
    config = sample_config(cache={"dir": str(tmp_path / "features")})

    cached = run("cache", "--config", config, "--split", "train", "--dry-run")
    trained = run("train", "--config", config, "--dry-run")

    assert cached.code == 0, cached.err
    assert "to encode   8 images" in cached.out
    assert trained.code == 0, trained.err
    assert "37 samples, 0 records left out" in trained.out
    assert not (tmp_path / "features").exists()
    assert not (tmp_path / "run").exists()


def test_a_half_written_checkpoint_is_not_gone_on_from(
    run: Callable[..., Any], sample_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = sample_config("stages.jsonl", train={"max_steps": 2, "save_steps": 1, "eval_split": None})
    assert run("cache", "--config", config, "--split", "train").code == 0
    assert run("train", "--config", config, "--from-cache").code == 0
    shutil.rmtree(tmp_path / "run" / "adapter")
    (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").unlink()

    again = run("train", "--config", config, "--from-cache")

    assert again.code == 0, again.err
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_the_run_folder_of_another_run_is_refused(run: Callable[..., Any], sample_config: Callable[..., Path]) -> None:
    config = sample_config("stages.jsonl", train={"max_steps": 1, "eval_split": None})
    assert run("cache", "--config", config, "--split", "train").code == 0
    assert run("train", "--config", config, "--from-cache").code == 0

    other = run("train", "--config", config, "--from-cache", "--set", "train.learning_rate=1e-3")

    assert other.code == 2
    assert "train.learning_rate: 0.0001 there, 0.001 now" in other.err
