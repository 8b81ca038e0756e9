"""Save and restore the random state of a process as tensors and built-in Python values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from slipstream.checkpoint.matching import restoring

__all__ = ["get_random_state", "set_random_state"]


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
    """Restore a state returned by `get_random_state`.

    Raises:
        CheckpointError: an entry is missing or is not the state of a generator.
    """
    with restoring("random_state", "the checkpoint"):
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"].cpu())
        if "accelerator" in state and (device := _device_module()) is not None:
            device.set_rng_state(state["accelerator"].cpu())


def _device_module() -> Any | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)
