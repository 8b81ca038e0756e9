"""Speed option: fused optimizer kernels, which update many weights in a single kernel launch."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.optim.kernels import has_explicit_kernels, use_fused, why_not_fused

__all__ = ["fuse", "read_fused"]


def read_fused(value: Any) -> bool | None:
    """Read `fused`: True (required), None (if supported), or False (do not change the optimizer).

    Raises:
        ConfigError: the value has an unsupported type.
    """
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"must be True, False or None, not {value!r}", "fused")


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
