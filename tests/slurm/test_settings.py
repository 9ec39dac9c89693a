"""The `slurm:` section: times, sizes, options and lines that would not work are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import slurm
from cache.errors import ConfigError
from pipeline.config import PipelineConfig
from pipeline.config_file import load_config
from slurm.chain import check_setup
from slurm.config import SlurmConfig
from slurm.environment import OwnJob, without_job
from slurm.errors import SlurmError
from slurm.times import parse_time, slurm_time

from .conftest import require


def _load(folder: Path, slurm: str) -> PipelineConfig:
    file = folder / "my.yaml"
    file.write_text(f"model: m\ndata: {{splits: {{train: t.jsonl}}}}\noutput_dir: run\nslurm: {slurm}\n")
    return load_config(file)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21600),
        ("90m", 5400),
        ("90min", 5400),
        ("1d12h", 129600),
        ("45s", 45),
        ("08:00:00", 28800),
        ("1-12:00:00", 129600),
        ("2-00", 172800),
    ],
)
def test_times(text: str, seconds: int) -> None:
    assert parse_time(text) == seconds


@given(st.integers(1, 10**7))
def test_times_are_read_back(seconds: int) -> None:
    assert parse_time(slurm_time(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "6 h", "0h", "00:00:00", "-1h", "1h\n", "12:00"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time such as 6h"):
        parse_time(text)


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ("{partitoin: gpu}", "slurm.partitoin: there is no such setting; nearest: slurm.partition"),
        ('{partition: "a\\nb"}', "slurm.partition: cannot stand in an #SBATCH line"),
        ("{account: 'a\\b'}", "slurm.account: cannot stand in an #SBATCH line"),
        ("{train: {time: 12:00:00}}", "slurm.train.time: must be a text; put it in quotes"),
        ("{train: {time: tomorrow}}", "slurm.train.time: must be a time such as 6h, 90m"),
        ("{gpu_type: 'a100:2'}", "slurm.gpu_type: must be a type of GPU such as a100, of letters, digits and -_.+"),
        ("{train: {gpu_type: 'a100,gpu:h100'}}", "slurm.train.gpu_type: must be a type of GPU such as a100"),
        ("{mem: lots}", "slurm.mem: must be a size such as 64G"),
        ("{setup: ['echo a\\']}", "slurm.setup: must be one whole line of bash"),
        ('{setup: ["a\\nb"]}', "slurm.setup: must be one whole line of bash"),
        ("{sbatch: [mail-type=END]}", "is not one option of sbatch"),
        ("{sbatch: [--output=x]}", "the chain sets --output itself"),
        ("{sbatch: ['-d afterok:1']}", "the chain sets --dependency itself"),
        ("{sbatch: [--depend=singleton]}", "the chain sets --depend itself"),
        ("{sbatch: [--ar=0-9]}", "the chain sets --ar itself"),
        ("{sbatch: [-W]}", "the chain sets --wait itself: the number of the job is read from sbatch's answer"),
        ("{sbatch: [--signal=TERM@60]}", "the chain sets --signal itself: jobs save their work on it"),
        ("{sbatch: [--no-requeue]}", "the chain sets --no-requeue itself: interrupted jobs go on by it"),
        ("{sbatch: [--ntasks-per-gpu=2]}", "the chain sets --ntasks-per-gpu itself: each node has one task"),
        ("{sbatch: [--clusters=other]}", "'--clusters=other': the chain does not work with --clusters: the jobs are"),
        ("{sbatch: ['-M other']}", "the chain does not work with --clusters: the jobs are followed, tied and put back"),
        ("{sbatch: [--export=NONE]}", "the chain does not work with --export: the job, and what srun starts in it"),
        ("{sbatch: ['--export=ALL,A=1']}", "set variables with slurm.setup: [export NAME=value]"),
        ("{sbatch: [--export-file=env]}", "the chain does not work with --export-file: the job, and what srun"),
        ("{sbatch: [--get-user-env]}", "the chain does not work with --get-user-env"),
        ("{sbatch: [--test-only]}", "the chain does not work with --test-only: sbatch would submit nothing"),
        ("{sbatch: [-k]}", "the chain does not work with --no-kill: a job whose node fails has to end"),
        (
            "{sbatch: ['--exclusive --array=0-9']}",
            "is not one option of sbatch: write it as in --mail-type=FAIL, each as",
        ),
        ("{sbatch: [\"--comment='a' --output=x\"]}", "is not one option of sbatch"),
        ("{sbatch: ['-x node07 -d afterok:1']}", "is not one option of sbatch"),
        ("{sbatch: ['-H -dafterok:1']}", "is not one option of sbatch"),
        ("{sbatch: [-Hd]}", "is not one option of sbatch"),
        ("{sbatch: ['--exclude node07']}", "is not one option of sbatch"),
        ('{sbatch: ["--comment=\'a"]}', "is not one option of sbatch"),
        ("{sbatch: [' ']}", "is not one option of sbatch"),
        ("{sbatch: [\"'--output=x'\"]}", "the chain sets --output itself"),
        (
            "{sbatch: [--time=9h]}",
            "'--time=9h': set slurm.cache.time or slurm.train.time or slurm.eval.time or slurm.light",
        ),
        ("{sbatch: ['-t 9']}", "set slurm.cache.time"),
        ("{sbatch: ['--gres=gpu:a100:2']}", "and for their type slurm.gpu_type, instead"),
        ("{sbatch: [--gpus-per-node=2]}", "set slurm.cache.gpus"),
        ("{sbatch: ['-G 2']}", "set slurm.cache.gpus"),
        ("{sbatch: ['-N 2']}", "set slurm.train.nodes instead"),
        ("{sbatch: [--mem-per-cpu=2G]}", "set slurm.mem instead"),
        ("{sbatch: ['-c 2']}", "set slurm.cpus_per_task instead"),
        ("{sbatch: [--part=gpu]}", "set slurm.partition instead"),
        ("{sbatch: ['-A lab']}", "set slurm.account instead"),
        ("{sbatch: [--qo=long]}", "set slurm.qos instead"),
        ("{sbatch: ['-C a100']}", "set slurm.constraint instead"),
        ('{sbatch: ["--comment=a\\n#SBATCH --array=0-9"]}', "slurm.sbatch: cannot stand in an #SBATCH line"),
        ("{train: {time: 4m}}", "signal_seconds 300 is no shorter than train.time 4m"),
        ("{cache: {num_parts: 0}}", "slurm.cache.num_parts: must be greater than 0"),
        ("{experiments: job}", "slurm.experiments: must be 'jobs' or 'allocation'"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, slurm: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        _load(tmp_path, slurm)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "option",
    [
        "--exclusive",
        "-H",
        "-x node07",
        "--comment='a b'",
        '--comment="a --array=0"',
        "--time-min=1:00",
        "--mem-bind=local",
    ],
)
def test_options_that_have_no_setting_are_taken(option: str) -> None:
    assert SlurmConfig(sbatch=(option,)).sbatch == (option,)


@pytest.mark.parametrize("line", ["echo 'a", 'echo "a', "cat <<EOF", "if true; then", "f() {", "echo $(", "}"])
def test_a_setup_line_that_would_take_the_command_with_it_is_refused(line: str) -> None:
    with pytest.raises(SlurmError, match="is not a whole line of bash"):
        check_setup(["true", line])


def test_setup_lines_that_people_write_are_taken() -> None:
    check_setup(
        [
            "source /home/me/venv/bin/activate",
            'export HF_HOME="$SCRATCH/hf"',
            "if [ -e x ]; then . x; fi  # as it is",
            'eval "$(conda shell.bash hook)"',
        ]
    )


def test_one_file_alone_reads_what_slurm_tells_a_job() -> None:
    root = Path(slurm.__file__).parent.parent
    readers = [
        str(file.relative_to(root))
        for name in ("cache", "train", "pipeline", "slurm")
        for file in (root / name).rglob("*.py")
        if re.search(r"""(get|environ\w*)\W{1,3}SLURM""", file.read_text())
    ]
    assert readers == ["slurm/environment.py"]


@pytest.mark.parametrize(("ci", "can_install"), [(True, False), (False, True), (True, True)])
def test_without_slurm_the_tests_fail_where_it_could_be_there(ci: bool, can_install: bool) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"sbatch missing\): `make slurm` installs it"):
        require(["sbatch"], ci=ci, can_install=can_install)


def test_without_slurm_the_tests_are_skipped_elsewhere() -> None:
    with pytest.raises(pytest.skip.Exception, match="SLURM is not installed"):
        require(["sbatch"], ci=False, can_install=False)
    require([], ci=True, can_install=True)


def test_what_a_job_knows_of_itself() -> None:
    assert OwnJob.of({}) is None
    assert OwnJob.of({"SLURM_JOB_ID": "7"}) == OwnJob("7", 0)
    task = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "3"}
    assert OwnJob.of(task) == OwnJob("7_2", 3)


def test_a_submission_from_within_a_job_takes_nothing_of_it_along() -> None:
    inside = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "1", "SLURMD_NODENAME": "n", "SRUN_CPUS_PER_TASK": "2"}
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "me"}
    assert without_job({**inside, **kept}) == kept
