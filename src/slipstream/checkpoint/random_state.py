"""Save and restore the random state of a process as tensors and built-in Python values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["get_random_state", "random_state_problem", "set_random_state"]


def get_random_state() -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch (CPU) and this process's accelerator."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if (device := _device_module()) is not None:
        state["accelerator"] = device.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `get_random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if "accelerator" in state and (device := _device_module()) is not None:
        device.set_rng_state(state["accelerator"].cpu())


def random_state_problem(state: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the key of the first invalid entry and the reason why it is invalid, or None if all entries are valid.

    The CPU entries are loaded into new generators, and only the dtype and the number of dimensions of the
    accelerator's entry are checked, so the random state of the process does not change.
    """
    attempts: dict[str, Callable[[Any], object]] = {
        "python": _try_python,
        "numpy": _try_numpy,
        "torch": lambda value: torch.Generator().set_state(value.cpu()),
        "accelerator": _try_accelerator,
    }
    for key, attempt in attempts.items():
        if key == "accelerator" and key not in state:
            continue
        try:
            attempt(state[key])
        except Exception as error:  # the value can have any type
            return key, f"{type(error).__name__}: {error}"
    return None


def _try_python(value: Any) -> None:
    version, words, gauss = value
    if gauss is not None and not isinstance(gauss, float):
        raise TypeError(f"the third entry must be a float or None, not a {type(gauss).__name__}")
    random.Random().setstate((version, tuple(words), gauss))


def _try_numpy(value: Any) -> None:
    kind, keys, position, has_gauss, cached = value
    words = keys.numpy()
    if words.dtype != np.int64 or words.min() < 0 or words.max() >= 2**32:
        raise ValueError("the state words are not unsigned 32-bit integers")
    if type(position) is not int or not 0 <= position <= len(words):
        raise ValueError(f"the position {position!r} is invalid")
    if has_gauss not in (0, 1) or not isinstance(cached, float):
        raise ValueError("the stored Gaussian value is not a number")
    np.random.RandomState().set_state((kind, words.astype(np.uint32), position, has_gauss, cached))


def _try_accelerator(value: Any) -> None:
    if value.dtype is not torch.uint8 or value.dim() != 1:
        raise TypeError("it is not a 1-dim uint8 tensor")


def _device_module() -> Any | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)
