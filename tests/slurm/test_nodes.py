"""Both nodes at once: an array of eight parts, one training over two nodes, and the chain without `pipeline submit`."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import slurm
from cache.reader import FeatureCache

from .cluster import Cluster
from .conftest import BIN, jobs_of, steps_of

pytestmark = pytest.mark.timeout(900)


def test_an_array_of_eight_parts_on_two_nodes(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], tmp_path: Path
) -> None:
    # Four tasks fill a node.
    cache = {"num_parts": 8, "cpus_per_task": 2, "gpus": 1, "gpu_type": "a100"}
    config = job_config(slurm={"cache": cache, "sbatch": ["--hold"]})
    assert verb("submit", "--config", config).code == 0
    jobs = jobs_of(config)
    held = verb("status", "--config", config).out
    assert "8 PENDING  (JobHeldUser: held; `scontrol release` lets it go)" in held
    for name in ("cache-val", "check", "train", "eval"):
        cluster.client("scancel", jobs[name])
    cluster.client("scontrol", "release", jobs["cache-train"])

    assert cluster.wait([jobs["cache-train"]]) == {jobs["cache-train"]: " ".join(["COMPLETED"] * 8)}
    nodes = Counter(
        re.findall(r"^   NodeList=(\S+)", cluster.client("scontrol", "show", "job", jobs["cache-train"]), re.M)
    )
    assert nodes == dict.fromkeys(cluster.nodes, 4)
    (folder,) = (tmp_path / "run" / "features").iterdir()
    listed = [e["key"] for f in (folder / "shards").glob("*.json") for e in json.loads(f.read_text())["entries"]]
    assert len(listed) == len(set(listed)) == 12  # no image was encoded twice
    assert len(FeatureCache.open(folder).split("train").images) == 12
    checked = verb("check", "--config", config, "--split", "train")
    assert checked.out == "split train: all 12 distinct images are cached\n"
    missing = verb("check", "--config", config)
    assert missing.code == 4
    assert "split 'val' has not been cached yet" in missing.err


def test_training_over_two_nodes_is_stopped_and_goes_on(
    cluster: Cluster, verb: Callable[..., Any], job_config: Callable[..., Path], features: Path, tmp_path: Path
) -> None:
    steps = 150
    config = job_config(
        cache={"dir": str(features)}, train={"max_steps": steps, "save_steps": 1000}, slurm={"train": {"nodes": 2}}
    )
    assert verb("submit", "--config", config).code == 0
    job = jobs_of(config)["train"]
    run = tmp_path / "run"
    cluster.until(lambda: len(steps_of(run)) > 10, "training runs", now=lambda: _log(run, job))
    assert cluster.show(job, "NumNodes") == "2"

    cluster.client("scancel", "--signal=USR1", job)  # as SLURM does ahead of the limit: to all processes of the step
    cluster.until(lambda: cluster.show(job, "Restarts") == "1", "it goes back", now=lambda: _log(run, job))
    kept = max(steps_of(run))
    assert (run / f"checkpoint-{kept}").is_dir()
    assert cluster.wait([job]) == {job: "COMPLETED"}, _log(run, job)
    assert steps_of(run) == list(range(1, steps + 1))
    assert list((run / f"checkpoint-{steps}").glob("rng_state_1.pth"))  # there were two processes
    assert f"job {job} goes back into the queue" in _log(run, job)


def _log(run: Path, job: str) -> str:
    return (run / "slurm" / "logs" / f"train.{job}.log").read_text()


def test_the_chain_with_nothing_but_sbatch(cluster: Cluster, job_config: Callable[..., Path], tmp_path: Path) -> None:
    config = job_config(output_dir="run").rename(tmp_path / "my own.yaml")
    chain = Path(slurm.__file__).with_name("chain.sh")
    environment = {**cluster.environment, "PATH": f"{BIN}:{cluster.environment['PATH']}", "OMP_NUM_THREADS": "1"}
    # What people edit in the two files, given by sbatch's own variables.
    environment |= {"SBATCH_MEM_PER_NODE": "1G"}
    usage = subprocess.run(["bash", chain], capture_output=True, text=True, check=False)
    assert (usage.returncode, usage.stderr.startswith("Cache, then train")) == (2, True)

    done = subprocess.run(
        ["bash", chain, config.name, "2", "train"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"cache of train: job (\d+)\ntraining: job (\d+)\n", done.stdout)
    assert found, done.stdout
    assert cluster.show(found[2], "Dependency").startswith(f"afterok:{found[1]}_*")
    assert cluster.wait([found[1], found[2]]) == {found[1]: "COMPLETED COMPLETED", found[2]: "COMPLETED"}
    assert (tmp_path / f"cache.{found[1]}_1.log").is_file()
    with safe_open(tmp_path / "run/adapter/adapter_model.safetensors", "pt") as adapter:
        assert list(adapter.keys())
