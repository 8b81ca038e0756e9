"""Keep the results of complete searches, by model, configuration, machine and versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from slipstream.checkpoint import get_random_state, set_random_state
from slipstream.cores import cores, cpu_features
from slipstream.files import write_text
from slipstream.tune.result import TuneResult
from slipstream.version import __version__

__all__ = ["cache_file", "describe_objects", "load", "store"]


def cache_file(run: Any, names: list[str], budget: float) -> Path:
    """Return the file for the results of a search.

    Args:
        run: the configuration, or the description of the objects; anything with a stable `repr` or JSON form.
        names: the measured options.
        budget: the time limit in seconds.
    """
    key = json.dumps([run, names, budget, _machine(), _versions()], sort_keys=True, default=repr)
    key = re.sub(r" at 0x[0-9a-f]+", "", key)  # addresses differ between processes
    return _folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def load(file: Path) -> TuneResult | None:
    """Return the stored result, or None if there is none or it is not readable."""
    try:
        return TuneResult.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(file: Path, result: TuneResult) -> None:
    """Store a result if its search is complete. Without write access, nothing is stored."""
    if result.outcome.stopped:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text(file, json.dumps(result.to_dict(), default=str))


def describe_objects(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, loss_fn: Any
) -> dict[str, Any]:
    """Return the structure of the user's objects: classes, options, shapes and dtypes, but no weights or data."""
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {
        "model": repr(model),
        "tensors": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors],
        "optimizer": [type(optimizer).__name__, repr(groups)],
        "loss": [
            getattr(loss_fn, "__qualname__", ""),
            repr(loss_fn),
            _code(loss_fn),
            _code(type(model).forward),
        ],
        "loader": _describe_loader(loader),
    }


def _describe_loader(loader: Any) -> list[Any]:
    names = ("batch_size", "num_workers", "drop_last", "pin_memory", "prefetch_factor")
    dataset = getattr(loader, "dataset", loader)
    size = len(dataset) if hasattr(dataset, "__len__") else None
    options = [getattr(loader, name, None) for name in names]
    return [type(loader).__name__, type(dataset).__name__, size, options, _describe_sample(dataset)]


def _describe_sample(dataset: Any) -> list[str]:
    """Return the types, shapes and dtypes of the first sample; empty if the dataset has no samples by index."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return []
    state = get_random_state()
    try:
        leaves = tree_leaves(dataset[0])
    except Exception:  # the run raises the error
        return []
    finally:
        set_random_state(state)
    return [
        f"{type(leaf).__name__} {list(getattr(leaf, 'shape', ()))} {getattr(leaf, 'dtype', '')}"
        for leaf in leaves
    ]


def _code(function: Any) -> str:
    """Return a digest of a Python function's code; empty for other callables."""
    code = getattr(function, "__code__", None)
    return "" if code is None else hashlib.sha256(repr(_content(code)).encode()).hexdigest()


def _content(code: CodeType) -> list[Any]:
    constants: list[Any] = []
    for value in code.co_consts:
        if isinstance(value, CodeType):
            constants.append(_content(value))
        else:  # the order of a set differs between processes
            constants.append(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
    return [code.co_code, code.co_names, constants]


def _folder() -> Path:
    if configured := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(configured).expanduser().absolute() / "tune"
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "slipstream" / "tune"


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
