"""Speed option: sharpness-aware minimization, with two forward and backward passes per batch.

SAM: Foret et al. 2021 (arXiv 2010.01412). ASAM (`adaptive=True`): Kwon et al. 2021 (arXiv 2102.11600).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slipstream.optim import OptimWrapper
from slipstream.optim.optim_wrapper import total_norm
from slipstream.step.parts import StepPart
from slipstream.typecheck import NonNegative, Positive

__all__ = ["SamOptions", "SharpnessAware"]

_TINY = 1e-12  # avoids NaN for a zero gradient


@dataclass(frozen=True)
class SamOptions:
    """Options of `sam=dict(...)`; True selects the defaults."""

    rho: Positive = 0.05
    """Norm of the weight perturbation. The ASAM paper uses values about ten times those in the SAM paper."""
    adaptive: bool = False
    """Whether to scale the perturbation of each weight by its absolute value (ASAM)."""
    eta: NonNegative = 0.01
    """With `adaptive`, the number added to each weight's absolute value, so that zero weights are also perturbed."""

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the step part that computes the gradients."""
        return SharpnessAware(model, self)


class SharpnessAware(StepPart):
    """Computes the gradients at `w + rho * g / norm(g)` instead of at the weights `w`.

    With `adaptive`, they are computed at `w + rho * t² * g / norm(t * g)`. As in the authors' code, `t` is
    `abs(w) + eta` for parameters with `weight` in the last component of their name, and 1 for all others. In both
    cases, a loss scale cancels out.

    Args:
        model: the model, unwrapped. The second pass does not change its buffers.
        options: the options.
    """

    replaces_gradients = True

    def __init__(self, model: nn.Module, options: SamOptions) -> None:
        self.model, self.options = model, options
        named_params = model.named_parameters() if options.adaptive else ()
        # Use a dict, because torch.compile cannot trace lookups in a set.
        self.scaled = dict.fromkeys(p for name, p in named_params if "weight" in name.rpartition(".")[2])

    def gradients(
        self, params: Sequence[nn.Parameter], compute: Callable[[], list[Tensor]], first: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients at the perturbed weights, and restore weights and buffers."""
        buffers = [
            (module._buffers, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        changed = [*(param.detach() for param in params), *(buffer for _, _, buffer in buffers)]
        before = [tensor.clone() for tensor in changed]
        try:
            self._perturb(params, first)
            return compute()
        finally:
            for owner, name, buffer in buffers:
                if owner[name] is not buffer:  # forward has assigned a new tensor
                    owner[name] = buffer
            with torch.no_grad():
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(old)

    @torch.no_grad()
    def _perturb(self, params: Sequence[nn.Parameter], grads: list[Tensor]) -> None:
        scales = [param.abs() + self.options.eta if param in self.scaled else None for param in params]
        ascents = [g if t is None else g * t for g, t in zip(grads, scales, strict=True)]
        factor = self.options.rho / (total_norm(ascents) + _TINY)
        for param, ascent, scale in zip(params, ascents, scales, strict=True):
            step = ascent * factor.to(ascent.device, ascent.dtype)
            param.add_(step if scale is None else step * scale)
