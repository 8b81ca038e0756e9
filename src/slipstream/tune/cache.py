"""Cache the results of complete searches, keyed by model, configuration, machine and versions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from slipstream.checkpoint import get_random_state, set_random_state
from slipstream.cores import cores, cpu_features
from slipstream.files import user_cache, write_text
from slipstream.registry import DATASETS, HOOKS, MODELS, OPTIM_WRAPPERS, OPTIMIZERS
from slipstream.tune.code import describe_callable, describe_model, digest
from slipstream.tune.result import TuneResult
from slipstream.version import __version__

__all__ = ["cache_file", "describe_config", "describe_objects", "load", "store"]

_REGISTRIES = (MODELS, DATASETS, HOOKS, OPTIMIZERS, OPTIM_WRAPPERS)


def cache_file(run: Any, names: list[str], budget: float) -> Path:
    """Return the cache file for the result of a search.

    Args:
        run: the description of the configuration or the objects; any value with a stable `repr` or JSON
            representation.
        names: the measured options.
        budget: the time limit in seconds.
    """
    return user_cache("tune") / f"{digest([run, names, budget, _machine(), _versions()])[:32]}.json"


def load(file: Path) -> TuneResult | None:
    """Return the stored result, or None if it does not exist or cannot be read."""
    try:
        return TuneResult.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(file: Path, result: TuneResult) -> None:
    """Store the result of a complete search. Without write access, nothing is stored."""
    if result.outcome.stopped:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(file, json.dumps(result.to_dict(), default=str))


def describe_objects(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, loss_fn: Any
) -> dict[str, Any]:
    """Describe the code and the structure of the user's objects, but not their weights or data."""
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return {
        "model": describe_model(model),
        "optimizer": [describe_callable(type(optimizer)), repr(groups)],
        "loss": [repr(loss_fn), describe_callable(loss_fn)],
        "loader": [*_describe_loader(loader), describe_callable(getattr(loader, "collate_fn", None))],
    }


def describe_config(cfg: Any) -> Any:
    """Return a Runner's configuration, with class and function names supplemented by descriptions of their code."""
    if isinstance(cfg, Mapping):
        described = {str(key): describe_config(value) for key, value in cfg.items()}
        if isinstance(kind := cfg.get("type"), str):
            described["type"] = [kind, *(describe_callable(value) for value in _registered_objects(kind))]
        return described
    if isinstance(cfg, list | tuple):
        return [describe_config(value) for value in cfg]
    if isinstance(cfg, nn.Module):
        return describe_model(cfg)
    if isinstance(cfg, torch.utils.data.DataLoader):
        return [*_describe_loader(cfg), describe_callable(cfg.collate_fn)]
    if cfg is None or isinstance(cfg, bool | int | float | str):
        return cfg
    return [repr(cfg), describe_callable(cfg)]


def _registered_objects(name: str) -> list[Any]:
    """Return the objects that are registered under this name in `_REGISTRIES`."""
    with suppress(Exception):  # the run reports errors such as an unknown scope
        return [item for registry in _REGISTRIES if (item := registry.get(name)) is not None]
    return []


def _describe_loader(loader: Any) -> list[Any]:
    names = ("batch_size", "num_workers", "drop_last", "pin_memory", "prefetch_factor")
    dataset = getattr(loader, "dataset", loader)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    options = [getattr(loader, name, None) for name in names]
    return [type(loader).__name__, type(dataset).__name__, size, options, _describe_sample(dataset)]


def _describe_sample(dataset: Any) -> list[str]:
    """Return the types, shapes and dtypes in the first sample, or an empty list if the dataset cannot be indexed."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return []
    state = get_random_state()
    try:
        leaves = tree_leaves(dataset[0])
    except Exception:  # ignored here, because the run raises the same error
        return []
    finally:
        set_random_state(state)
    return [
        f"{type(leaf).__name__} {list(getattr(leaf, 'shape', ()))} {getattr(leaf, 'dtype', '')}"
        for leaf in leaves
    ]


def _machine() -> dict[str, Any]:
    count = torch.cuda.device_count()
    return {
        "cpu": cpu_features() or platform.processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
    }


def _versions() -> list[str]:
    return [__version__, torch.__version__, platform.python_version()]
