"""What a captured step is made of, and which batches are worth capturing it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipstream.step.numerics import LossScale, Scalar
from slipstream.step.update import GraphUpdate

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["Captured", "Outputs", "Shapes"]

Outputs = tuple[dict[str, Tensor], list[Tensor], Tensor | None]
"""What to log, the gradients of a window that goes on (or whose optimizer steps outside), whether all were finite."""


class Captured:
    """What a graph is made of, for as long as the same parameters are trained in the same groups."""

    run: Callable[..., Outputs]

    def __init__(self, optim: OptimWrapper, params: list[nn.Parameter], updates_inside: bool) -> None:
        self.optim = optim
        self.params = params
        device = params[0].device
        self.window = Scalar(1.0, device)
        self.scale = LossScale.of(optim, device)
        self.update = GraphUpdate(optim.optimizer, params) if updates_inside else None
        self.proven: set[bool] = set()
        self._trained = self._now_trained()

    def fits(self) -> bool:
        """Say whether the graph can be used as it is; takes over what schedules have changed."""
        same = self._trained == self._now_trained()
        return (self.update is None or self.update.refresh()) and same

    def trains(self, params: list[nn.Parameter]) -> bool:
        """Say whether these are its parameters."""
        return list(map(id, self.params)) == list(map(id, params))

    def held(self) -> list[Tensor]:
        """Return the gradients of the window so far."""
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]

    def _now_trained(self) -> list[bool]:
        return [p.requires_grad for p in self.optim.parameters()]


class Shapes:
    """Decides which batches are worth a graph: those of the first shape, and others once they are many."""

    def __init__(self) -> None:
        self._first: list[torch.Size] | None = None
        self._steps = self._others = 0

    def worth_a_graph(self, inputs: Any) -> bool:
        """Count a batch; say whether a graph should train on it."""
        shapes = [leaf.shape for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if self._first is None:
            self._first = shapes
        self._steps += 1
        if shapes == self._first:
            return True
        self._others += 1
        return self._others >= 8 and self._others * 8 >= self._steps
