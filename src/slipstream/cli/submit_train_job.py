"""`slipstream submit --to kubernetes --api v2`: the TrainJob for Kubeflow Trainer."""

from __future__ import annotations

import argparse
from typing import Any

from slipstream.cli.submit_checks import tasks_per_node
from slipstream.errors import ConfigError

__all__ = ["RUNTIME", "train_job"]

RUNTIME = "torch-distributed"
"""The training runtime for torch that is installed together with Kubeflow Trainer."""

_CONTAINER = _REPLICATED_JOB = "node"
"""Name of both the container and the replicated job that run training in a runtime for torch."""


def train_job(
    args: argparse.Namespace, metadata: dict[str, str], pod: dict[str, Any], runtime: str
) -> dict[str, Any]:
    """Return the manifest of a TrainJob whose pods match `pod`, a pod specification with one container.

    A TrainJob contains only the pod fields that differ from those of its training runtime.

    Raises:
        ConfigError: an option has no corresponding field in a TrainJob.
    """
    if args.secret:
        raise ConfigError(
            "`--secret` is not supported with `--api v2`, because a TrainJob has no field for it; remove it, and add "
            "the Secret to the training runtime"
        )
    (container,) = pod["containers"]
    trainer = {
        **{name: container[name] for name in ("image", "command", "env")},
        "numNodes": args.nodes,
        "numProcPerNode": tasks_per_node(args),
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container["resources"]
    changed = {
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "containers": [{"name": _CONTAINER, "volumeMounts": container["volumeMounts"]}],
        "volumes": pod["volumes"],
    }
    job = {"name": _REPLICATED_JOB, "template": {"spec": {"template": {"spec": changed}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "slipstream/submit",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
                }
            ],
        },
    }
