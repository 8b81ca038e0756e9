"""Checks of the options of `slipstream submit` that do not depend on the cluster."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from slipstream.errors import ConfigError
from slipstream.redaction import is_secret_name

__all__ = ["check_options", "check_secrets"]

_OPTIONS = {
    "slurm": ("partition", "account", "qos", "time", "requeue", "sbatch", "dry_run"),
    "kubernetes": ("image", "volume", "env", "secret", "namespace", "shm_size", "grace_period", "out"),
}


def check_options(args: argparse.Namespace) -> None:
    """Raise a `ConfigError` if an option belongs to a different cluster than `args.to`."""
    for cluster, names in _OPTIONS.items():
        for name in names:
            if cluster != args.to and getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"`{flag}` is an option of `--to {cluster}`; remove it to submit to {args.to}"
                )


def check_secrets(overrides: Sequence[str], file: str) -> None:
    """Raise a `ConfigError` if an override contains a secret, which would be stored in `file`."""
    for word in overrides:
        key, _, value = word.partition("=")
        if is_secret_name(key.rpartition(".")[2]) and value and "{{" not in value and "${" not in value:
            raise ConfigError(
                f"the {file} would contain this secret; write {{{{ $NAME }}}} in the configuration, and set the "
                "environment variable NAME before you submit",
                key,
            )
