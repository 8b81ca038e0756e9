"""A simulated Ascend NPU: a device `npu` that runs on the CPU and reports kernels, copies and synchronization.

torch loads this package through its entry point in the group `torch.backends`, as it loads the real torch_npu. If the
environment variable SIMULATED_NPU_HCCL is 0, the backend `hccl` is not registered.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_npu import _C

__all__ = ["HOST_READS", "autoload", "watching"]

DEVICES = 2
HOST_READS = ("item", "device_to_host", "hidden_sync", "synchronize")
"""Kinds of operations that make the host wait for the device."""


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    """The context manager `torch.npu.device`."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


def _module() -> types.ModuleType:
    """Return the `torch.npu` module."""
    npu: Any = types.ModuleType("torch.npu")
    generators = tuple(_C.default_generator(index) for index in range(DEVICES))
    npu.default_generators = generators
    npu.is_available = npu.is_initialized = lambda: True
    npu._initialized = True  # activation checkpointing saves random states only if this is True
    npu.is_bf16_supported = lambda *_, **__: True
    npu.device_count = lambda: DEVICES
    npu.device = _Device
    npu.current_device = lambda: torch.accelerator.current_device_index()
    npu.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    npu.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    npu._is_in_bad_fork = _C.bad_fork
    npu._lazy_init = lambda: None
    npu.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    npu.get_device_name = lambda device=None: "simulated NPU"
    npu.manual_seed = lambda seed: _C.default_generator(-1).manual_seed(seed)
    npu.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in generators]
    npu.initial_seed = lambda: _C.default_generator(-1).initial_seed()
    npu.get_rng_state = lambda device="npu": generators[_index(device)].get_state()
    npu.set_rng_state = lambda state, device="npu": generators[_index(device)].set_state(state)
    npu.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    npu.Stream, npu.Event, npu.stream = torch.Stream, torch.Event, lambda stream: stream
    npu.empty_cache = lambda: None
    npu.max_memory_allocated = lambda device=None: torch.accelerator.max_memory_allocated(_index(device))
    return npu


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from torch.distributed import ProcessGroupGloo

    return _C.hccl(ProcessGroupGloo(store, rank, size, timeout))


def _register() -> None:
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _module())
    sys.modules.setdefault("torch.npu", torch.npu)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if os.environ.get("SIMULATED_NPU_HCCL", "1") != "0":
        import torch.distributed as dist

        dist.Backend.register_backend("hccl", _hccl, devices=["npu"])


def autoload() -> None:
    """Do nothing: PyTorch imports this module before it calls the entry point, and the import registers the device."""


def _stack() -> str:
    """Return as text the innermost frames (at most five) that are not in an installed package."""
    installed = ("/torch_npu/", "/site-packages/", "/lib/python")
    frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in installed)]
    return " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames[-5:]))


@contextmanager
def watching(kinds: Collection[str] = HOST_READS) -> Iterator[Counter[tuple[str, str, str]]]:
    """Count the operations of these kinds inside the context, by (kind, detail, Python stack)."""
    seen: Counter[tuple[str, str, str]] = Counter()

    def see(kind: str, detail: str) -> None:
        if kind in kinds:
            seen[kind, detail, _stack()] += 1

    _C.watch(see)
    try:
        yield seen
    finally:
        _C.watch(None)


_register()
