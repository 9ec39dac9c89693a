"""Job scripts: pinned by golden files, and nothing that a user writes gets out of its place."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.chain import Done, plan_jobs
from pipeline.config import PipelineConfig
from slurm.config import JobConfig, SlurmConfig
from slurm.errors import SlurmError
from slurm.sbatch import ARRAY_TASK, Script, render, sbatch_value

GOLDEN = Path(__file__).parent / "golden"
_PLACES = {"logs": Path("/home/me/runs/first/slurm/logs"), "workdir": Path("/work"), "path": Path("/home/me/venv/bin")}
_PLAIN = {"model": "Qwen/Qwen3-VL-8B-Instruct", "data": {"splits": {"train": "t.jsonl", "val": "v.jsonl"}}}
_FULL = {
    "partition": "gpu",
    "account": "lab",
    "qos": "long",
    "constraint": "a100|h100",
    "gpu_type": "h100",
    "cpus_per_task": 8,
    "mem": "64G",
    "modules": ["cuda/12.4", "my module"],
    "setup": ["source /home/me/env.sh", 'export HF_HOME="$SCRATCH/hf"'],
    "sbatch": ["--mail-type=FAIL", "--exclude=node07"],
    "signal_seconds": 600,
    "max_requeues": 5,
    "cache": {"num_parts": 8, "max_running": 3, "time": "90m", "gpu_type": "l40s"},
    "train": {"nodes": 2, "gpus": 4, "time": "1-12:00:00", "cpus_per_task": 32, "mem": "240G", "partition": "big"},
    "eval": {"time": "30m"},
}
_STAGES = {"one": {"train": {"order": "sample"}}, "two": {"stages": {"first": {}, "second": {}}}}
_CASES = {
    "plain": {},
    "full": {"slurm": _FULL},
    "jobs": {"experiments": _STAGES},
    "allocation": {"experiments": _STAGES, "slurm": {"experiments": "allocation", "train": {"gpus": 4}}},
}


def _scripts(case: str) -> str:
    config = PipelineConfig.model_validate({**_PLAIN, "output_dir": "/home/me/runs/first", **_CASES[case]})
    parts = tuple(range(config.slurm.cache.num_parts))
    done = Done({"train": parts, "val": (1, 3)}, frozenset(), frozenset(), comparison=False)
    jobs = plan_jobs(config, Path("/home/me/runs/first/slurm/config.yaml"), done)
    return "\n".join(
        f"### {job.name}, after ok: {' '.join(job.chained.after_ok)}, after any: {' '.join(job.chained.after_any)}\n"
        + render(job.chained.script, config.slurm, **_PLACES)
        for job in jobs
    )


@pytest.mark.parametrize("case", _CASES)
def test_scripts_are_those_of_the_golden_files(case: str) -> None:
    file = GOLDEN / f"{case}.txt"
    text = _scripts(case)
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


def test_scripts_are_whole_for_bash() -> None:
    for case in _CASES:
        done = subprocess.run(["bash", "-n"], input=_scripts(case), capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


_NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text not in (".", "..") and len(text.encode()) < 100
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=st.lists(_NAMES, min_size=1, max_size=4), folder=_NAMES, module=_NAMES)
@example(
    words=["$(touch pwned)", "`touch pwned`", "a\nb; touch pwned", "'\"\\", "-x", "~", "*"], folder="a\n'b", module="m"
)
@example(words=["$HOME", "!!", "\\\n", "#", "&& touch pwned"], folder='$(touch pwned)"', module="$(touch pwned)")
def test_every_word_arrives_as_it_was_written(words: list[str], folder: str, module: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        workdir = Path(temporary) / folder
        workdir.mkdir()
        program = Path(temporary) / "bin"
        program.mkdir()
        dump = f'#!/bin/bash\nprintf "%s\\0" "$0" "$@" "$PWD/" > {temporary}/{{}}\n'
        for name in ("pipeline", "module"):
            (program / name).write_text(dump.format(f"{name}.argv"))
            (program / name).chmod(0o755)
        script = Script("job", "A job.", ("pipeline", *words, ARRAY_TASK), JobConfig(), tasks=(3,))
        fits = module.isprintable() and "\\" not in module
        config = SlurmConfig(modules=(module,) if fits else ())
        text = render(script, config, logs=Path("/logs"), workdir=workdir, path=program).replace("bash -l", "bash")
        environment = {"PATH": os.environ["PATH"], "HOME": temporary, "SLURM_ARRAY_TASK_ID": "7"}
        done = subprocess.run(
            ["bash"], input=text.encode(), capture_output=True, env=environment, cwd=temporary, check=False
        )

        assert (done.returncode, done.stderr) == (0, b"")
        arguments = (Path(temporary) / "pipeline.argv").read_bytes().decode().split("\0")[1:]
        assert arguments == [*words, "7", f"{workdir}/", ""]
        if fits:
            loaded = (Path(temporary) / "module.argv").read_bytes().decode().split("\0")[1:3]
            assert loaded == ["load", module]
        assert list(Path(temporary).rglob("pwned")) == []


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "a\\b", "a\x7fb", "a\u2028b"])
def test_what_no_sbatch_line_can_hold_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="cannot stand in an #SBATCH line"):
        sbatch_value(text)
    with pytest.raises(SlurmError, match="choose another name or folder"):
        render(
            Script("job", "A job.", ("true",), JobConfig()),
            SlurmConfig(),
            logs=Path("/work") / text,
            workdir=Path("/work"),
            path=Path("/bin"),
        )


def test_names_of_jobs_are_ours() -> None:
    for name in ("a b", "a/b", "a\nb", "ä", "$a"):
        with pytest.raises(ValueError, match="is not for a script"):
            render(Script(name, "A job.", ("true",), JobConfig()), SlurmConfig(), **_PLACES)
