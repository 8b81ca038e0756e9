"""Detect losses that a compiled model does not support.

These losses differentiate the model's gradients, or run several backward passes through the model's outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.step.leaves import leaves_of

__all__ = ["BackwardPasses", "check_compiled_backward", "observe_backward"]

_UNSUPPORTED = ("non-empty donated buffers", "does not currently support double backward")
"""Parts of torch's error messages for a second backward pass through a compiled model."""


class BackwardPasses:
    """Records properties of the backward passes through the outputs of a model."""

    def __init__(self) -> None:
        self.creates_graph = False
        """Whether a backward pass had `create_graph=True`, as in a gradient penalty."""
        self.is_repeated = False
        """Whether there were several backward passes through the outputs of one call (`retain_graph=True`)."""

    @property
    def problem(self) -> str | None:
        """The reason why a backward pass through the compiled model would raise an error, or None if it would not."""
        if self.creates_graph:
            return "the loss differentiates the model's gradients (create_graph=True)"
        if self.is_repeated:
            return "there are several backward passes through the model's outputs (retain_graph=True)"
        return None

    def observe(self, outputs: Any) -> None:
        """Record each backward pass through `outputs`, the outputs of a single call to the model.

        Compiled code has one autograd node for all its outputs, so backward passes through different outputs count as
        several passes. Computing a gradient with respect to an output does not run that output's autograd node, so
        such a backward pass is not recorded.
        """
        passes: set[int] = set()

        def hook(_: Any) -> None:
            self.creates_graph |= torch.is_grad_enabled()  # backward sets the grad mode to `create_graph`
            passes.add(torch._C._current_graph_task_id())
            self.is_repeated |= len(passes) > 1

        for node in {leaf.grad_fn for leaf in leaves_of(outputs) if isinstance(leaf, Tensor)}:
            if node is not None:
                node.register_prehook(hook)


@contextmanager
def observe_backward(model: nn.Module) -> Iterator[BackwardPasses]:
    """Record the backward passes through the outputs of calls to `model` inside the context."""
    passes = BackwardPasses()
    if isinstance(model, torch.jit.ScriptModule):  # does not support forward hooks in Python
        yield passes
        return
    handle = model.register_forward_hook(lambda _, __, outputs: passes.observe(outputs))
    try:
        yield passes
    finally:
        handle.remove()


def check_compiled_backward(
    error: RuntimeError,
    remedy: str = "set compile=dict(scope='step') if the whole step can be compiled as one graph",
) -> None:
    """Raise a `ModelError` if a backward pass failed because a compiled model does not support it."""
    if any(part in str(error) for part in _UNSUPPORTED):
        raise ModelError(
            "the loss differentiates the model's gradients (create_graph=True) or runs several backward passes through "
            "the model's outputs (retain_graph=True), neither of which a compiled model supports; set compile=False, "
            f"or {remedy}"
        ) from error
