"""Detect losses that torch.compile does not support for a model: those that differentiate the model's gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipstream.errors import ModelError

__all__ = ["BackwardPasses", "check_compiled_backward", "observe_backward"]

_UNSUPPORTED = ("non-empty donated buffers", "does not currently support double backward")
"""Parts of torch's errors for a second backward pass through a compiled model."""


class BackwardPasses:
    """What the backward passes through the outputs of a model did."""

    def __init__(self) -> None:
        self.creates_graph = False
        """Whether a backward pass had `create_graph=True`, as in a gradient penalty."""
        self.is_repeated = False
        """Whether there were several backward passes through the same output (`retain_graph=True`)."""

    @property
    def problem(self) -> str | None:
        """The reason why the compiled model would raise an error in a backward pass, or None."""
        if self.creates_graph:
            return "the loss differentiates the model's gradients (create_graph=True)"
        if self.is_repeated:
            return "there are several backward passes through the same output (retain_graph=True)"
        return None

    def observe(self, output: Tensor) -> None:
        """Record each backward pass through `output`."""
        seen = [False]

        def hook(_: Tensor) -> None:
            self.creates_graph |= torch.is_grad_enabled()  # torch sets the grad mode to `create_graph`
            self.is_repeated |= seen[0]
            seen[0] = True

        output.register_hook(hook)


@contextmanager
def observe_backward(model: nn.Module) -> Iterator[BackwardPasses]:
    """Record the backward passes through the outputs of calls of `model` inside the context."""
    found = BackwardPasses()

    def hook(_: nn.Module, __: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                found.observe(output)

    handle = model.register_forward_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def check_compiled_backward(error: RuntimeError) -> None:
    """Raise a `ModelError` if a backward pass failed because torch.compile does not support it for a model."""
    if any(part in str(error) for part in _UNSUPPORTED):
        raise ModelError(
            "the loss differentiates the model's gradients (create_graph=True) or runs several backward passes through "
            "one output (retain_graph=True), which torch.compile does not support for a compiled model; use "
            "compile=dict(scope='step'), or compile=False"
        ) from error
