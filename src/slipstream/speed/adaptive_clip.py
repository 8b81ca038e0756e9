"""Speed option: clip the gradient of each unit relative to the norm of its weights (adaptive gradient clipping).

Brock et al. 2021 (NFNets, arXiv 2102.06171).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slipstream.model.blocks import find_modules
from slipstream.optim import OptimWrapper
from slipstream.step.parts import StepPart
from slipstream.typecheck import Positive

__all__ = ["AdaptiveClipOptions", "ClipUnits"]

_KEY = "adaptive_clip"


@dataclass(frozen=True)
class AdaptiveClipOptions:
    """Options of `adaptive_clip=dict(...)`; True selects the defaults."""

    clip_factor: Positive = 0.01
    """Maximum ratio of the gradient norm to the weight norm, for each unit."""
    eps: Positive = 1e-3
    """Lower bound for the norm of a unit's weights, so that units whose weights are zero can be trained."""
    exclude: list[str] = field(default_factory=list)
    """Modules whose gradients are not clipped, by name (with `*` and `?`) or class. The paper excludes the last
    linear layer (for example, `exclude=['head']`)."""

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the step part that clips gradients.

        Raises:
            ConfigError: a name in `exclude` matches no module.
        """
        modules = find_modules(model, self.exclude, f"{_KEY}.exclude")
        return ClipUnits(self.clip_factor, self.eps, [p for module in modules for p in module.parameters()])


class ClipUnits(StepPart):
    """Scales the gradient of each unit so that its norm is at most `clip_factor * max(norm of its weights, eps)`.

    A unit is one slice of a weight along its first dimension, such as one output channel of a convolution. A parameter
    with fewer than two dimensions is a single unit.

    Args:
        clip_factor, eps: see `AdaptiveClipOptions`.
        excluded: parameters whose gradients are not clipped.
    """

    def __init__(self, clip_factor: float, eps: float, excluded: Sequence[nn.Parameter] = ()) -> None:
        self.clip_factor, self.eps = clip_factor, eps
        self.excluded = dict.fromkeys(excluded)  # a dict, because torch.compile cannot trace lookups in a set

    def before_update(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> None:
        """Clip the gradients in place."""
        for param, grad in zip(params, grads, strict=True):
            if param in self.excluded:
                continue
            limit = unit_norms(param.detach()).clamp(min=self.eps) * self.clip_factor
            grad.mul_(limit / torch.maximum(unit_norms(grad), limit))


def unit_norms(tensor: Tensor) -> Tensor:
    """Return the 2-norm of each unit, in a shape that broadcasts against `tensor`."""
    dims = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
    return norms
