"""Option checks that `slipstream submit` performs for every kind of cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slipstream.errors import ConfigError
from slipstream.redaction import is_secret_name

__all__ = ["check_options", "check_secrets", "tasks_per_node"]

_OPTIONS = {
    "slurm": ("mem", "partition", "account", "qos", "time", "requeue", "sbatch", "dry_run"),
    "kubernetes": ("mem", "image", "volume", "env", "secret", "namespace", "shm_size", "grace_period", "out",
                   "api", "runtime"),
    "ray": ("address", "env"),
}  # fmt: skip
"""Options that do not apply to all clusters."""


def check_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if an option does not apply to the kind of cluster in `args.to`."""
    for name in (name for names in _OPTIONS.values() for name in names):
        if name not in _OPTIONS[args.to] and getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            clusters = [f"`--to {cluster}`" for cluster, names in _OPTIONS.items() if name in names]
            raise ConfigError(
                f"`{flag}` only applies to {' and '.join(clusters)}; remove it to submit to {args.to}"
            )


def tasks_per_node(args: argparse.Namespace) -> int:
    """Return the number of processes per node: one per GPU, or `--tasks-per-node`."""
    return int(args.gpus_per_node.rpartition(":")[2] if args.gpus_per_node else args.tasks_per_node)


def check_secrets(overrides: Sequence[str], file: str) -> None:
    """Raise a `ConfigError` if an override contains a secret, which would be stored in `file`."""
    for word in overrides:
        key, _, value = word.partition("=")
        if is_secret_name(key.rpartition(".")[2]) and value and "{{" not in value and "${" not in value:
            raise ConfigError(
                f"the {file} would contain this secret; write {{{{ $NAME }}}} in the configuration, and set the "
                "environment variable NAME before you submit; on Kubernetes, also pass `--secret`",
                key,
            )
