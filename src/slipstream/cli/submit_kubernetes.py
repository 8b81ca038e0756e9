"""`slipstream submit --to kubernetes`: write a PyTorchJob or a TrainJob for Kubeflow."""

from __future__ import annotations

import argparse
import posixpath
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml
from yaml.representer import BaseRepresenter

from slipstream.cli.configure import command_args, configure
from slipstream.cli.submit_checks import check_secrets, tasks_per_node
from slipstream.cli.submit_train_job import RUNTIME, train_job
from slipstream.errors import ConfigError
from slipstream.files import write_text
from slipstream.preemption import EXIT_STATUS
from slipstream.redaction import is_secret_name

__all__ = ["manifest", "run"]

_GRACE_PERIOD = 120
_LAUNCHER_EXIT_TIME = 10
"""Seconds of the grace period that are reserved for the launcher to exit after the training processes."""

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_NAME, _MAX_POD = 253, 63


class _Volume(NamedTuple):
    claim: str
    path: str


def run(args: argparse.Namespace) -> int:
    """Write the manifest to `--out`, or print it. Nothing is created in the cluster."""
    cfg = configure(args)
    text = manifest(args, cfg.work_dir)
    if args.out is None:
        print(text, end="")
        return 0
    out = Path(args.out)
    write_text(out, text)
    print(f"Wrote {out}. Create the job: kubectl create -f {shlex.quote(str(out))}")
    return 0


def manifest(args: argparse.Namespace, work_dir: str) -> str:
    """Return the manifest as YAML. A relative `work_dir` is resolved against the first volume's path.

    Raises:
        ConfigError: an option is missing, or its value is not valid in Kubernetes.
    """
    check_secrets(args.overrides, "manifest")
    volumes = [_volume(word) for word in args.volume]
    argv = command_args(args, command="train", work_dir=_in_volume(work_dir, volumes), resume=True)
    train = ["python", "-m", "slipstream", *argv, f"--nproc={tasks_per_node(args)}"]
    metadata = {"name": _job_name(args)}
    if args.namespace:
        metadata["namespace"] = _check(_NAME, args.namespace, "--namespace")
    if args.api == "v2":
        runtime = _check(_NAME, args.runtime or RUNTIME, "--runtime")
        job = train_job(args, metadata, _pod(args, volumes, train), runtime)
    elif args.runtime:
        raise ConfigError("`--runtime` requires `--api v2`; a PyTorchJob has no training runtime")
    else:
        script = _SCRIPT.format(saved=EXIT_STATUS, command=shlex.join(train))
        job = _pytorch_job(args, metadata, _pod(args, volumes, ["/bin/sh", "-c", script]))
    return _HEADERS[args.api or "v1"] + yaml.dump(job, Dumper=_Dumper, sort_keys=False, width=10_000)


def _pytorch_job(args: argparse.Namespace, metadata: dict[str, str], pod: dict[str, Any]) -> dict[str, Any]:
    replicas = {"Master": 1, "Worker": args.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(tasks_per_node(args)),
            "pytorchReplicaSpecs": {
                # With ExitCode, the operator replaces a pod whose exit status is at least 128.
                kind: {"replicas": count, "restartPolicy": "ExitCode", "template": {"spec": pod}}
                for kind, count in replicas.items()
                if count
            },
        },
    }


_RESUME_NOTE = """\
# A restarted pod resumes from the last checkpoint in its --work-dir, or starts from scratch if there is none.
"""

_HEADERS = {
    "v1": "# Written by `slipstream submit --to kubernetes` for the Kubeflow Training Operator.\n"
    + _RESUME_NOTE,
    "v2": "# Written by `slipstream submit --to kubernetes --api v2` for Kubeflow Trainer.\n" + _RESUME_NOTE,
}

_SCRIPT = """\
# On SIGTERM, the training processes save their state, and the command in each pod exits with status {saved}. The
# operator restarts a pod whose exit status is 128 or above, so this script changes {saved} to 143. Other errors end the
# job.
run= stopped=
trap 'stopped=1; if [ "$run" ]; then kill -TERM "$run"; fi' TERM
{command} &
run=$!
if [ "$stopped" ]; then kill -TERM "$run"; fi
status=0
wait "$run" || status=$?
if [ "$stopped" ]; then # the signal interrupted `wait`, but not the training processes
  status=0
  wait "$run" || status=$?
  if [ "$status" -gt 128 ]; then exit 143; fi # the processes ended before they could save their state
fi
if [ "$status" -eq {saved} ]; then exit 143; fi
if [ "$status" -ge 128 ]; then exit 1; fi
exit "$status"
"""


def _pod(args: argparse.Namespace, volumes: list[_Volume], command: list[str]) -> dict[str, Any]:
    grace: int = args.grace_period or _GRACE_PERIOD
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(1, grace - _LAUNCHER_EXIT_TIME)), **_environ(args)}
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator requires this name
        "image": _require(args.image, "--image"),
        "command": [_escape(word) for word in command],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    if args.secret:
        names = [_check(_NAME, name, "--secret") for name in args.secret]
        container["envFrom"] = [{"secretRef": {"name": name}} for name in names]
    if limits := _limits(args):
        container["resources"] = {"limits": limits}
    container["volumeMounts"] = [
        *({"name": f"volume-{i}", "mountPath": volume.path} for i, volume in enumerate(volumes)),
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    # Data loader workers pass batches through shared memory, and a container has only 64 MiB of it by default.
    shm = {"medium": "Memory"}
    if args.shm_size:
        shm["sizeLimit"] = _check(_QUANTITY, args.shm_size, "--shm-size")
    return {
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": [
            *(
                {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": volume.claim}}
                for i, volume in enumerate(volumes)
            ),
            {"name": "shm", "emptyDir": shm},
        ],
    }


def _escape(script: str) -> str:
    """Escape the script for Kubernetes, which replaces `$(NAME)` and `$$` in commands."""
    return re.sub(r"\$(?=[$(])", "$$", script)


def _limits(args: argparse.Namespace) -> dict[str, str]:
    limits = {}
    if args.gpus_per_node:
        kind, _, _ = args.gpus_per_node.rpartition(":")
        if kind and "/" not in kind:
            raise ConfigError(
                f"`--gpus-per-node`: '{kind}' is not the name of a Kubernetes resource, such as nvidia.com/gpu; to "
                "select a GPU type, add a nodeSelector to the manifest"
            )
        limits[kind or "nvidia.com/gpu"] = str(tasks_per_node(args))
    if args.cpus_per_task:
        limits["cpu"] = str(args.cpus_per_task * tasks_per_node(args))
    if args.mem:
        limits["memory"] = _check(_QUANTITY, args.mem, "--mem")
    return limits


def _environ(args: argparse.Namespace) -> dict[str, str]:
    variables = dict(args.env)
    for name, value in variables.items():
        _check(_VARIABLE, name, "--env")
        if value and is_secret_name(name):
            raise ConfigError(
                f"`--env`: the manifest would contain the secret {name}; store it in a Kubernetes Secret, and pass the "
                "name of the Secret with --secret"
            )
    return variables


def _volume(word: str) -> _Volume:
    claim, _, path = word.partition(":")
    _check(_NAME, claim, "--volume")
    if not path.startswith("/") or posixpath.normpath(path) != path or path == "/":
        raise ConfigError(f"`--volume`: '{word}' is not CLAIM:PATH with an absolute path, such as runs:/runs")
    return _Volume(claim, path)


def _in_volume(work_dir: str, volumes: list[_Volume]) -> str:
    """Return the absolute path of the work_dir in the pods.

    The work_dir must be in a volume, because Kubernetes deletes a pod's other files together with the pod.
    """
    if not volumes:
        raise ConfigError(
            "the work_dir must be in a volume, so that a restarted pod can resume; add --volume CLAIM:PATH with the "
            "name of a PersistentVolumeClaim and the path at which to mount it"
        )
    path = posixpath.normpath(PurePosixPath(volumes[0].path) / work_dir)
    if not any(PurePosixPath(path).is_relative_to(volume.path) for volume in volumes):
        raise ConfigError(
            f"'{path}' is not in any of the volumes ({', '.join(volume.path for volume in volumes)}); choose a "
            "folder in one of them, or mount another volume with --volume CLAIM:PATH",
            "work_dir",
        )
    return path


def _job_name(args: argparse.Namespace) -> str:
    """Return a job name that is short enough for the names of its pods to have at most 63 characters."""
    pod_suffix = f"-worker-{args.nodes}" if args.api != "v2" else f"-node-0-{args.nodes}-12345"
    max_length = _MAX_POD - len(pod_suffix)
    name = args.job_name
    if not name:
        name = re.sub(r"[^a-z0-9]+", "-", Path(args.config).stem.lower()).strip("-")
        name = (name if name[:1].isalpha() else f"train-{name}")[:max_length].rstrip("-")
    if not _LABEL.fullmatch(name) or len(name) > max_length:
        raise ConfigError(
            f"`--job-name`: '{name}' must start with a letter and consist of at most {max_length} lowercase letters, "
            "digits and hyphens"
        )
    return str(name)


def _require(value: str | None, flag: str) -> str:
    if not value:
        raise ConfigError(f"`{flag}` is required for `--to kubernetes`")
    return value


def _check(pattern: re.Pattern[str], value: str, flag: str) -> str:
    if len(value) > _MAX_NAME or not pattern.fullmatch(value):
        raise ConfigError(f"`{flag}`: '{value}' is not valid in Kubernetes; it must match {pattern.pattern}")
    return value


def _represent_text(dumper: BaseRepresenter, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, and repeated values without anchors."""

    yaml_representers = {**yaml.SafeDumper.yaml_representers, str: _represent_text}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True
