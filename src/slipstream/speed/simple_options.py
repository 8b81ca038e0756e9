"""Options without a class of their own: switches, numbers, and options that other packages implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.optim.kernels import has_explicit_kernels, use_fused, why_not_fused
from slipstream.optim.optim_wrapper import GradClip

__all__ = ["fuse", "read_accumulate", "read_bool", "read_clip_grad", "read_fused", "read_gc", "read_sync_bn"]


def read_bool(value: Any, name: str) -> bool:
    """Read a boolean option (such as `cudnn_benchmark`): True, False or None.

    Raises:
        ConfigError: the value has an unsupported type; `name` is its config path.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ConfigError(f"must be True or False, not {value!r}", name)


def read_sync_bn(value: Any) -> bool:
    """Read `sync_bn`: True, False, None, or MMEngine's `'torch'`, which is the same as True."""
    return True if value == "torch" else read_bool(value, "sync_bn")


def read_fused(value: Any) -> bool | None:
    """Read `fused`: True (required), None (if supported), or False (do not change the optimizer)."""
    return None if value is None else read_bool(value, "fused")


def read_gc(value: Any) -> int | None:
    """Read `gc`: the number of steps between garbage collections; None and False keep automatic collection."""
    return None if value is None or value is False else _positive(value, "gc", "garbage collection")


def read_accumulate(value: Any) -> int:
    """Read `accumulate`: the number of batches per optimizer step."""
    return 1 if value is None else _positive(value, "accumulate", "optimizer step")


def _positive(value: Any, name: str, unit: str) -> int:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"must be the number of batches per {unit}, an int of at least 1, not {value!r}", name
        )
    return value


def read_clip_grad(value: Any) -> GradClip | None:
    """Read `clip_grad`: `dict(max_norm=...)` or `dict(type='value', clip_value=...)`; False and None disable it.

    Raises:
        ConfigError: the value is not a dict, or the dict is invalid (see `GradClip.from_dict`).
    """
    if isinstance(value, GradClip):
        return value
    if not value:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a dict such as dict(max_norm=35), not {value!r}", "clip_grad")
    return GradClip.from_dict(value)


def fuse(optimizer: Optimizer, wanted: bool | None) -> bool:
    """Switch `optimizer` to fused kernels according to `wanted`; return whether it uses them.

    By default, torch uses foreach kernels on accelerators and a loop over the weights on the CPU.

    Args:
        optimizer: the optimizer, which may already have taken steps.
        wanted: True requires fused kernels. None selects them if torch provides them for the optimizer class, the
            devices and the dtypes, unless the optimizer was built with `fused=` or `foreach=`. False does not change
            the optimizer.

    Raises:
        ConfigError: `wanted` is True, and fused kernels are not supported.
    """
    if wanted is None and not has_explicit_kernels(optimizer) and why_not_fused(optimizer) is None:
        use_fused(optimizer)
    if wanted:
        if any(group.get("foreach") for group in optimizer.param_groups):
            raise ConfigError("the optimizer has foreach=True; use only one of fused and foreach", "fused")
        if reason := why_not_fused(optimizer):
            raise ConfigError(f"{reason}; remove fused to use torch's default kernels", "fused")
        use_fused(optimizer)
    return all(group.get("fused") is True for group in optimizer.param_groups)
