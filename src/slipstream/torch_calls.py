"""Torch's optimizer step without the parts of its Python code that have no effect in a step."""

from __future__ import annotations

from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer, optimizer

# The code of the function that torch wraps around the `step` of each optimizer class.
_WRAPPER: Any = Optimizer.profile_hook_step(print)


def run_optimizer(optim: Optimizer, **kwargs: Any) -> None:
    """Call `optim.step(**kwargs)`, without a profiler record unless a profiler is active."""
    step: Any = type(optim).step
    if (
        getattr(step, "__code__", None) is not _WRAPPER.__code__
        or "step" in vars(optim)  # replaced, for example by a schedule
        or optim._optimizer_step_pre_hooks
        or optim._optimizer_step_post_hooks
        or optimizer._global_optimizer_pre_hooks
        or optimizer._global_optimizer_post_hooks
        or _profiler_enabled()
    ):
        optim.step(**kwargs)
    else:
        step.__wrapped__(optim, **kwargs)
