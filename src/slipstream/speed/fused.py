"""Option: the optimizer's fused kernels, which move many weights with one launch."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.optim.kernels import kernels_chosen, use_fused, why_not_fused

__all__ = ["fuse", "read_fused"]


def read_fused(value: Any) -> bool | None:
    """Read `fused`: True (or an error), None (where it can be), or False (as the optimizer was built).

    Raises:
        ConfigError: anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"must be True, False or None, not {value!r}", "fused")


def fuse(optimizer: Optimizer, wanted: bool | None) -> bool:
    """Let `optimizer` run fused kernels; return whether it does.

    Without them torch takes its foreach kernels on accelerators and a loop over the weights on the CPU.

    Args:
        optimizer: a ready one, stepped or not.
        wanted: None takes fused kernels where torch has them for the class, the devices and the dtypes,
            unless the optimizer was built with `fused=` or `foreach=`; False leaves it as it was built.

    Raises:
        ConfigError: `wanted` is True, and it cannot be.
    """
    if wanted is None and not kernels_chosen(optimizer) and why_not_fused(optimizer) is None:
        use_fused(optimizer)
    if wanted:
        if any(group.get("foreach") for group in optimizer.param_groups):
            raise ConfigError("the optimizer has foreach=True: take one of the two", "fused")
        if reason := why_not_fused(optimizer):
            raise ConfigError(f"{reason}; leave fused out, and the fastest there is will be taken", "fused")
        use_fused(optimizer)
    return all(group.get("fused") is True for group in optimizer.param_groups)
