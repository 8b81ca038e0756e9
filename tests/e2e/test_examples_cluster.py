"""Tests of the files in examples/cluster. tests/distributed submits the batch script to a Slurm cluster."""

import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from kubernetes_schema import faults
from slipstream.cli.parser import parse

FOLDER = Path(__file__).parents[2] / "examples/cluster"


def test_batch_script_is_valid_and_trains_with_its_arguments(tmp_path):
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    options = re.findall(r"^#SBATCH (--[a-z-]+)(?:=\S+)?$", script.read_text(), re.MULTILINE)
    assert {"--nodes", "--ntasks-per-node", "--requeue", "--signal"} <= set(options)
    assert len(options) == script.read_text().count("\n#SBATCH")
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > arguments\nexit 3\n')
    (tmp_path / "srun").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", script, "recipe.py", "lr=0.1"], cwd=tmp_path, env=path, check=False)
    assert done.returncode == 3  # the job fails with the status of the training
    words = (tmp_path / "arguments").read_text().splitlines()
    args = parse(words[words.index("slipstream") + 1 :])
    assert (args.command, args.config, args.overrides) == ("train", "recipe.py", ["lr=0.1"])
    assert (args.launcher, args.resume) == ("slurm", True)


def test_train_job_matches_the_schema_of_kubeflow_trainer():
    job = yaml.safe_load((FOLDER / "trainjob.yaml").read_text())
    assert faults(job) == []
    words = job["spec"]["trainer"]["command"]
    args = parse(words[words.index("slipstream") + 1 :])
    assert (args.command, args.resume) == ("train", True)
    assert args.nproc == str(job["spec"]["trainer"]["numProcPerNode"])


def test_ray_script_passes_its_arguments_to_the_command():
    tree = ast.parse((FOLDER / "ray_train.py").read_text())
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == {"train", "main"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="requires Ray: pip install 'slipstream[ray]'")
def test_ray_script_trains_in_two_processes(tmp_path):
    shutil.copy(FOLDER / "ray_train.py", tmp_path)
    small = ["train_cfg.max_epochs=1", "train_dataloader.dataset.length=16", "param_scheduler=null"]
    command = [sys.executable, "ray_train.py", "street_scenes_pp_lite_t", *small, "--work-dir=out"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=400)
    assert list((tmp_path / "out").glob("epoch_1.pth"))
