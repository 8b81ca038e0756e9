"""Functions that recipes may call in `${...}`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError
from slipstream.files import check_name

__all__ = ["output_dir", "register_resolvers"]


def output_dir(ckpt_root_dir: str | None, experiment_name: str) -> str:
    """Return an experiment's folder: `ckpt_root_dir/experiment_name`. The default root is `work_dirs`."""
    return str(
        Path(ckpt_root_dir or "work_dirs") / check_name(experiment_name, "experiment_name", "ckpt_root_dir")
    )


def register_resolvers() -> None:
    """Register the SuperGradients resolvers with OmegaConf. Repeated calls have no effect."""
    from omegaconf import OmegaConf

    functions: dict[str, Callable[..., Any]] = {
        "hydra_output_dir": output_dir,
        "add": lambda *numbers: sum(numbers),
        "cond": lambda condition, yes, no: yes if condition else no,
        "getitem": lambda container, key: container[key],
        "first": lambda items: items[0],
        "last": lambda items: items[-1],
        "class": lambda path: path,  # the import path remains a string, which the registry looks up later
        "roboflow_dataset_num_classes": _reject_roboflow,
    }
    for name, function in functions.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def _reject_roboflow(*_: Any) -> Any:
    raise ConfigError("Roboflow datasets are not supported; set num_classes to a number")
