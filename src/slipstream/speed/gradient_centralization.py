"""Speed option: subtract the mean from the gradient of each weight (gradient centralization).

Yong et al. 2020 (arXiv 2004.01461).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from slipstream.optim import OptimWrapper
from slipstream.step.parts import StepPart

__all__ = ["CentralizeGradients", "GradientCentralizationOptions"]


@dataclass(frozen=True)
class GradientCentralizationOptions:
    """Options of `gradient_centralization=dict(...)`; True selects the defaults."""

    conv_only: bool = False
    """Whether to centralize only the gradients of convolution weights (three or more dimensions)."""

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the step part that centralizes gradients."""
        return CentralizeGradients(self.conv_only)


class CentralizeGradients(StepPart):
    """Subtracts the mean over all dimensions except the first from each weight's gradient, before the update."""

    def __init__(self, conv_only: bool = False) -> None:
        self.min_ndim = 3 if conv_only else 2

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> None:
        """Centralize the gradients in place; 1-dim gradients (of biases and normalization layers) are unchanged."""
        for grad in grads:
            if grad.ndim >= self.min_ndim:
                grad.sub_(grad.mean(dim=tuple(range(1, grad.ndim)), keepdim=True))
