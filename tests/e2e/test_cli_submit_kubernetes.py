"""Tests of the manifest of `slipstream submit --to kubernetes`. tests/distributed runs the commands of two pods."""

import copy
import os
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml

from kubernetes_schema import faults
from slipstream.cli.parser import parse
from slipstream.cli.submit_kubernetes import manifest
from slipstream.errors import ConfigError

RECIPE = "street_scenes_pp_lite_t"
NEEDED = ["--to", "kubernetes", "--image", "registry.example/slipstream:1", "--volume", "runs:/runs"]


def text(*arguments, work_dir="work_dirs/x"):
    return manifest(parse(["submit", RECIPE, *NEEDED, *arguments]), work_dir)


def job(*arguments, **options):
    return yaml.safe_load(text(*arguments, **options))


def replicas(job):
    return job["spec"]["pytorchReplicaSpecs"]


def pod(job, kind="Master"):
    return replicas(job)[kind]["template"]["spec"]


def container(job, kind="Master"):
    (only,) = pod(job, kind)["containers"]
    return only


def expanded(text):
    """Return a command after Kubernetes has replaced `$$` with `$`.

    `$(NAME)` is not replaced, because the manifests in these tests do not define the variables in the commands.
    """
    return re.sub(r"\$\$", "$", text)


def script(job):
    *shell, found = container(job)["command"]
    assert shell == ["/bin/sh", "-c"]
    return expanded(found)


def train_arguments(job):
    (line,) = [line for line in script(job).splitlines() if line.startswith("python ")]
    return shlex.split(line.removesuffix(" &"))


EVERYTHING = [
    *["--nodes", "3", "--gpus-per-node", "8", "--cpus-per-task", "4", "--mem", "64Gi", "--shm-size", "16Gi"],
    *["--volume", "data:/data", "--env", "A=b", "--env", "C=", "--secret", "tokens"],
    *["--namespace", "team", "--grace-period", "60", "--job-name", "mine"],
]


@pytest.mark.parametrize("arguments", [[], ["--nodes", "2", "--tasks-per-node", "2"], EVERYTHING])
def test_manifest_matches_the_operators_schema(arguments):
    assert faults(job(*arguments)) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["spec", "nprocPerNode"], 2, "nprocPerNode: 2 is not of type string"),
        (["spec", "replicas"], 2, "spec.replicas: unknown field"),
        (["spec", "pytorchReplicaSpecs", "Master", "restartpolicy"], "Never", "restartpolicy: unknown field"),
    ],
)
def test_schema_check_finds_errors(path, value, expected):
    wrong = copy.deepcopy(job())
    parent = wrong
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    (fault,) = faults(wrong)
    assert expected in fault


def test_one_pod_per_node_starts_one_process_per_gpu():
    found = job("--nodes", "3", "--gpus-per-node", "8")
    assert {kind: spec["replicas"] for kind, spec in replicas(found).items()} == {"Master": 1, "Worker": 2}
    assert found["spec"]["nprocPerNode"] == "8"
    assert pod(found, "Worker") == pod(found, "Master")
    assert container(found)["name"] == "pytorch", (
        "the container is not named `pytorch`, which the operator requires"
    )
    assert list(replicas(job())) == ["Master"]
    assert container(found)["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_resource_limits_cover_all_processes_of_a_pod():
    found = job("--gpus-per-node", "amd.com/gpu:4", "--cpus-per-task", "6", "--mem", "64Gi")
    assert container(found)["resources"] == {"limits": {"amd.com/gpu": "4", "cpu": "24", "memory": "64Gi"}}
    assert "resources" not in container(job())


def test_command_resumes_in_the_volume_with_unchanged_arguments():
    odd = ["randomness.seed=1", 'experiment_name=it\'s $(HOME) $$x $$(y) `x` "y" & z', "val_cfg={a: [1, 2]}"]
    found = train_arguments(job("--gpus-per-node", "2", *odd))
    assert found[:3] == ["python", "-m", "slipstream"]
    args = parse(found[3:])
    assert (args.command, args.config, args.overrides) == ("train", RECIPE, odd)
    assert (args.work_dir, args.resume, args.nproc) == ("/runs/work_dirs/x", True, "2")


def test_work_dir_can_be_in_any_volume():
    found = train_arguments(job("--volume", "data:/data", work_dir="/data/out"))
    assert parse(found[3:]).work_dir == "/data/out"
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in pod(job())["volumes"][:-1]} == {"runs"}


def test_shared_memory_is_limited_by_shm_size():
    found = job("--shm-size", "8Gi")
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in pod(found)["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(found)["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod(job())["volumes"]


def test_environment_has_the_variables_and_the_secrets():
    found = container(job("--env", "HF_HOME=/data/a=b", "--secret", "tracking"))
    assert {"name": "HF_HOME", "value": "/data/a=b"} in found["env"]
    assert found["envFrom"] == [{"secretRef": {"name": "tracking"}}]


def test_launcher_ends_the_processes_before_the_grace_period_ends():
    found = job("--grace-period", "300")
    assert pod(found)["terminationGracePeriodSeconds"] == 300
    (seconds,) = [
        v["value"] for v in container(found)["env"] if v["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    ]
    assert 0 < int(seconds) < 300


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a pod's script, with `python` replaced by the given shell code."""
    started = []

    def start_pod(python):
        (tmp_path / "python").write_text(f"#!/bin/sh\n{python}\n")
        (tmp_path / "python").chmod(0o755)
        environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        process = subprocess.Popen(["/bin/sh", "-c", script(job())], env=environ, cwd=tmp_path)
        started.append(process)
        return process

    yield start_pod
    for process in started:
        process.kill()
        process.wait()


def restarts(status):
    """Return whether the operator restarts a pod with the restart policy ExitCode after this exit status."""
    return status >= 128


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (1, 1), (2, 2), (137, 1), (139, 1)])
def test_pod_is_not_restarted_after_success_or_an_error(start, status, expected):
    assert {spec["restartPolicy"] for spec in replicas(job("--nodes", "2")).values()} == {"ExitCode"}
    found = start(f"exit {status}").wait(20)
    assert found == expected
    assert not restarts(found)


def test_pod_is_restarted_if_a_signal_in_another_pod_stops_the_run(start):
    assert restarts(start("exit 75").wait(20))


@pytest.mark.parametrize(("end", "again"), [("exit 75", 1), ("exit 143", 1), ("exit 0", 0), ("exit 1", 0)])
def test_evicted_pod_waits_for_the_training_processes(start, tmp_path, end, again):
    process = start(f"trap 'sleep 0.5; touch saved; {end}' TERM; touch ready; while true; do sleep 0.1; done")
    limit = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    status = process.wait(20)
    assert (tmp_path / "saved").exists()
    assert restarts(status) == again


def test_job_name_is_valid_in_kubernetes(tmp_path):
    assert job()["metadata"] == {"name": "street-scenes-pp-lite-t"}
    long = manifest(parse(["submit", f"{'Long_' * 20}.yaml", *NEEDED, "--nodes", "1000"]), "x")
    name = yaml.safe_load(long)["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(f"{name}-worker-998") <= 63
    digits = yaml.safe_load(manifest(parse(["submit", "3d.yaml", *NEEDED]), "x"))
    assert digits["metadata"]["name"] == "train-3d"
    assert job("--namespace", "team", "--job-name", "mine")["metadata"] == {
        "name": "mine",
        "namespace": "team",
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--volume", "runs:/runs"], "`--image` is required"),
        (["--image", "x"], "add --volume CLAIM:PATH"),
        ([*NEEDED[2:], "--work-dir", "/tmp/x"], "work_dir: '/tmp/x' is not in any of the volumes (/runs)"),
        ([*NEEDED[2:], "--work-dir", "../x"], "work_dir: '/x' is not in any"),
        ([*NEEDED[2:], "--volume", "data:relative"], "'data:relative' is not CLAIM:PATH"),
        ([*NEEDED[2:], "--volume", "data"], "'data' is not CLAIM:PATH"),
        ([*NEEDED[2:], "--volume", "My_Data:/data"], "`--volume`: 'My_Data' is not valid"),
        ([*NEEDED[2:], "--env", "A-B=c"], "`--env`: 'A-B'"),
        ([*NEEDED[2:], "--env", "A"], "--env: 'A'"),
        ([*NEEDED[2:], "--env", "WANDB_API_KEY=abc"], "the secret WANDB_API_KEY"),
        ([*NEEDED[2:], "--mem", "64 GB"], "`--mem`: '64 GB'"),
        ([*NEEDED[2:], "--gpus-per-node", "a100:4"], "'a100' is not the name of a Kubernetes resource"),
        ([*NEEDED[2:], "--job-name", "My_Job"], "`--job-name`: 'My_Job'"),
        ([*NEEDED[2:], "--partition", "dev"], "`--partition` only applies to `--to slurm`"),
        ([*NEEDED[2:], "--dry-run"], "`--dry-run` only applies to `--to slurm`"),
        ([*NEEDED[2:], "train_cfg.max_epoch=3"], "did you mean 'train_cfg.max_epochs'"),
    ],
)
def test_invalid_argument_raises_an_error_and_writes_nothing(slipstream, tmp_path, arguments, expected):
    done = slipstream("submit", RECIPE, "--to", "kubernetes", "--out", "job.yaml", *arguments, status=2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_secret_in_an_override_is_not_written_to_the_manifest():
    with pytest.raises(ConfigError, match="the manifest would contain this secret"):
        text("vis_backends.0.api_key=abc")
    assert "{{ $KEY }}" in text("vis_backends.0.api_key={{ $KEY }}")


def test_kubernetes_options_are_rejected_with_slurm(slipstream):
    done = slipstream("submit", RECIPE, "--image", "x", "--dry-run", status=2)
    assert "`--image` only applies to `--to kubernetes`; remove it to submit to slurm" in done.stderr


def test_manifest_is_printed_or_written_to_a_file(slipstream, tmp_path):
    printed = slipstream("submit", RECIPE, *NEEDED).stdout
    assert printed == text(work_dir=f"work_dirs/{RECIPE}")
    assert list(tmp_path.iterdir()) == []
    done = slipstream("submit", RECIPE, *NEEDED, "--out", "job.yaml")
    assert (tmp_path / "job.yaml").read_text() == printed
    assert done.stdout == "Wrote job.yaml. Create the job: kubectl create -f job.yaml\n"
