"""Torch's backward pass and optimizer step without the parts of their Python code that have no effect in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd.graph import _engine_run_backward
from torch.optim import Optimizer, optimizer

# The code of the function that torch wraps around the `step` of each optimizer class.
_WRAPPER: Any = Optimizer.profile_hook_step(print)


def run_backward(loss: Tensor, inputs: Any = None, **kwargs: Any) -> None:
    """Call `loss.backward(inputs=inputs, **kwargs)`.

    For a scalar and a list of inputs, or none, this omits the checks of the gradient of the loss, which is 1.
    """
    is_scalar = type(loss) is Tensor and loss.ndim == 0 and loss.is_floating_point()
    known = not kwargs and (inputs is None or (type(inputs) is list and inputs))
    if is_scalar and known and not torch._C._are_functorch_transforms_active():
        # The gradient of a parameter can be a view of this tensor, so each call creates its own.
        gradients, leaves = (torch.ones_like(loss),), tuple(inputs or ())
        _engine_run_backward(
            (loss,), gradients, False, False, leaves, allow_unreachable=True, accumulate_grad=True
        )
    else:
        loss.backward(inputs=inputs, **kwargs)


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
