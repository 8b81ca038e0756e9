"""Tests of the TrainJob that `slipstream submit --to kubernetes --api v2` writes."""

import copy
import re

import pytest
import yaml

from kubernetes_schema import faults
from slipstream.cli.parser import parse
from slipstream.cli.submit_kubernetes import manifest

RECIPE = "street_scenes_pp_lite_t"
NEEDED = ["--to", "kubernetes", "--image", "registry.example/slipstream:1", "--volume", "runs:/runs"]
EVERYTHING = [
    *["--nodes", "3", "--gpus-per-node", "8", "--cpus-per-task", "4", "--mem", "64Gi", "--shm-size", "16Gi"],
    *["--volume", "data:/data", "--env", "A=b", "--env", "C=", "--runtime", "my-torch"],
    *["--namespace", "team", "--grace-period", "60", "--job-name", "mine"],
]


def job(*arguments, api="v2"):
    args = parse(["submit", RECIPE, *NEEDED, "--api", api, *arguments])
    return yaml.safe_load(manifest(args, "work_dirs/x"))


def changed_pod(job):
    (patch,) = job["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node", "the job's name is not the one that the torch runtimes use"
    return replicated["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("arguments", [[], ["--nodes", "2", "--tasks-per-node", "2"], EVERYTHING])
def test_manifest_matches_the_schema_of_kubeflow_trainer(arguments):
    found = job(*arguments)
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert faults(found) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["spec", "trainer", "numProcPerNode"], "2", "numProcPerNode: '2' is not of type integer"),
        (["spec", "trainer", "envFrom"], [], "spec.trainer.envFrom: unknown field"),
        (["spec", "runtimeRef", "name"], "", "spec.runtimeRef.name: the length 0 is not allowed"),
        (["spec", "activeDeadlineSeconds"], 0, "spec.activeDeadlineSeconds: 0 is less than 1"),
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


def test_train_job_has_the_contents_of_the_pytorch_job():
    options = [word for word in EVERYTHING if word not in ("--runtime", "my-torch")]
    first, second = job(*options, api="v1"), job(*options)
    pod = first["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    trainer, changed = second["spec"]["trainer"], changed_pod(second)
    assert second["metadata"] == first["metadata"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 8)
    assert trainer["resourcesPerNode"] == container["resources"]
    assert (trainer["image"], trainer["env"]) == (container["image"], container["env"])
    assert changed["volumes"] == pod["volumes"]
    assert changed["containers"] == [{"name": "node", "volumeMounts": container["volumeMounts"]}]
    assert changed["terminationGracePeriodSeconds"] == pod["terminationGracePeriodSeconds"] == 60


def test_command_resumes_in_the_volume_with_unchanged_arguments():
    odd = ["randomness.seed=1", 'experiment_name=it\'s $(HOME) $$x `x` "y" & z']
    command = job("--gpus-per-node", "2", *odd)["spec"]["trainer"]["command"]
    words = [re.sub(r"\$\$", "$", word) for word in command]  # Kubernetes also replaces `$$`
    assert words[:3] == ["python", "-m", "slipstream"]
    args = parse(words[3:])
    assert (args.command, args.config, args.overrides) == ("train", RECIPE, odd)
    assert (args.work_dir, args.resume, args.nproc) == ("/runs/work_dirs/x", True, "2")


def test_runtime_can_be_chosen():
    assert job()["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert job("--runtime", "my-torch")["spec"]["runtimeRef"] == {"name": "my-torch"}


def test_pods_names_have_at_most_63_characters():
    name = manifest(parse(["submit", f"{'Long_' * 20}.yaml", *NEEDED, "--api", "v2", "--nodes", "1000"]), "x")
    assert len(f"{yaml.safe_load(name)['metadata']['name']}-node-0-999-12345") <= 63


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--api", "v2", "--secret", "tokens"], "`--secret` is not supported with `--api v2`"),
        (["--api", "v2", "--runtime", "My_Runtime"], "`--runtime`: 'My_Runtime' is not valid"),
        (["--runtime", "my-torch"], "`--runtime` requires `--api v2`"),
        (["--api", "v3"], "'v3' is not a valid VERSION"),
    ],
)
def test_invalid_argument_raises_an_error(slipstream, tmp_path, arguments, expected):
    done = slipstream("submit", RECIPE, *NEEDED, "--out", "job.yaml", *arguments, status=2)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_api_is_rejected_with_slurm(slipstream):
    done = slipstream("submit", RECIPE, "--api", "v2", "--dry-run", status=2)
    assert "`--api` only applies to `--to kubernetes`; remove it to submit to slurm" in done.stderr
