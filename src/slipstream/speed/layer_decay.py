"""Speed option: learning rates that decrease from a model's head to its input (layer-wise decay).

Clark et al. 2020 (ELECTRA, arXiv 2003.10555), Bao et al. 2021 (BEiT, arXiv 2106.08254).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.config import optional
from slipstream.errors import ConfigError
from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.blocks import find_modules
from slipstream.step.parts import StepPart
from slipstream.typecheck import is_real

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper

__all__ = ["DecayLayers", "LayerDecayOptions", "layer_factors", "read_layer_decay", "scales_with_lr"]

_KEY = "layer_decay"
_IGNORED_KEYS = ("params", "param_names", "lr", "fused", "foreach", "capturable", "differentiable")
"""Parameter-group keys that do not affect the update, or that `_take_steps` sets."""


@dataclass(frozen=True)
class LayerDecayOptions:
    """Options of `layer_decay=dict(...)`; True selects the defaults, and a number sets the decay."""

    decay: float = 0.75
    """Ratio of a layer's learning rate to that of the next layer, in (0, 1]."""
    layers: list[str] | None = None
    """The layers from input to output, by name (with the wildcards `*` and `?`) or class; each matching module is one
    layer. The default is the outermost repeated blocks of the model."""

    def __post_init__(self) -> None:
        """Check that `decay` is in (0, 1], and that `layers` is not empty."""
        if not 0 < self.decay <= 1:
            raise ConfigError(f"must be above 0 and at most 1, not {self.decay}", "decay")
        if self.layers is not None and not self.layers:
            raise ConfigError("must not be empty; remove it to use the model's repeated blocks", "layers")

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the step part that scales the updates.

        Raises:
            ConfigError: the model has no repeated blocks, a pattern matches no module, or the optimizer's update is
                not proportional to its learning rate.
        """
        optimizer = optim.optimizer
        if not scales_with_lr(optimizer):
            raise ConfigError(
                f"the update of {type(optimizer).__name__} is not known to be proportional to its learning rate; use "
                "a different optimizer, or set the lr of each layer with optim_wrapper.paramwise_cfg",
                _KEY,
            )
        factors = layer_factors(model, self)
        return DecayLayers({param: factors[name] for name, param in model.named_parameters()})


def read_layer_decay(value: Any) -> LayerDecayOptions | None:
    """Read `layer_decay`: True, False, None, the decay as a number, or a dict.

    Raises:
        ConfigError: the value has an unsupported type, an option is unknown, or the decay is not in (0, 1].
    """
    if is_real(value):
        value = {"decay": value}
    return optional(LayerDecayOptions, value, _KEY)


class DecayLayers(StepPart):
    """Scales the update of each parameter by a factor: `previous + factor * (updated - previous)`.

    For optimizers whose update is proportional to the learning rate (`scales_with_lr`), this is equivalent to a step
    with `factor` times the learning rate, including weight decay. The learning rates in the parameter groups do not
    change.

    Args:
        factors: the factor of each parameter; a parameter without an entry has a factor of 1.
    """

    needs_previous = True

    def __init__(self, factors: Mapping[nn.Parameter, float]) -> None:
        self.factors = {param: factor for param, factor in factors.items() if factor != 1.0}

    def after_update(self, params: Sequence[nn.Parameter], previous: Sequence[Tensor]) -> None:
        """Scale the updates in place."""
        for param, old in zip(params, previous, strict=True):
            if param in self.factors:
                param.copy_(torch.lerp(old, param.detach(), self.factors[param]))


def layer_factors(model: nn.Module, options: LayerDecayOptions) -> dict[str, float]:
    """Return the learning rate factor of each parameter by name.

    As in BEiT, the factor of the last layer is `decay`, the factor of the layer before it is `decay ** 2`, and so on.
    Parameters before the first layer (such as an embedding) have the smallest factor. Parameters after the last layer
    (such as a head) have a factor of 1. A parameter between two layers belongs to the layer before it. The result is in
    the order of `model.named_parameters()`.

    Raises:
        ConfigError: the model has no repeated blocks, or a pattern matches no module.
    """
    layers = _layers(model, options.layers)
    numbers = {param: number for number, layer in enumerate(layers, 1) for param in layer.parameters()}
    names, params = zip(*model.named_parameters(), strict=True)
    indices = [numbers.get(param) for param in params]
    before = list(accumulate(indices, lambda last, number: last if number is None else number, initial=0))[1:]
    last = max((i for i, number in enumerate(indices) if number is not None), default=-1)
    end = len(layers) + 1
    depths = [end - (number or 0) if i <= last else 0 for i, number in enumerate(before)]
    return {name: options.decay**depth for name, depth in zip(names, depths, strict=True)}


def _layers(model: nn.Module, patterns: list[str] | None) -> list[nn.Module]:
    """Return the layers from input to output."""
    if patterns is not None:
        found = (
            module for pattern in patterns for module in find_modules(model, [pattern], f"{_KEY}.layers")
        )
        return list(dict.fromkeys(found))
    blocks = set(repeated_blocks(model)) - {model}
    inner = {module for block in blocks for module in block.modules() if module is not block}
    layers = [module for module in model.modules() if module in blocks - inner]
    if not layers:
        raise ConfigError(
            "the model has no repeated blocks; list its layers from input to output", f"{_KEY}.layers"
        )
    return layers


def scales_with_lr(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update, with the current settings, is proportional to the learning rate.

    This function runs an optimizer of the same class on a small float64 weight, with a typical and a large learning
    rate, because some classes (Adafactor, Rprop) limit the size of an update. It returns False for a class that cannot
    be built from the settings in `param_groups`.
    """
    # ZeroRedundancyOptimizer wraps another optimizer.
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    known = inspect.signature(type(inner)).parameters
    for group in inner.param_groups:
        settings = {k: v for k, v in group.items() if k in known and k not in _IGNORED_KEYS}
        for lr in (0.1, 100.0):
            try:
                halved = _take_steps(type(inner), lr, settings, 0.5)
                half = _take_steps(type(inner), lr / 2, settings, 1.0)
            except Exception:  # a third-party optimizer can raise any exception
                return False
            if not (halved - half).abs().max() <= 1e-9 * half.abs().max():
                return False
    return True


def _take_steps(
    kind: Callable[..., Optimizer], lr: float, settings: Mapping[str, Any], factor: float
) -> Tensor:
    """Return a weight tensor after a few steps, each scaled by `factor`."""
    weight = nn.Parameter(torch.linspace(0.5, 2.0, 6, dtype=torch.float64).reshape(2, 3))
    optimizer = kind([weight], lr=lr, **settings)
    for number in range(1, 6):
        old = weight.detach().clone()
        grad = torch.linspace(-1.0, number, 6, dtype=torch.float64).reshape(2, 3)
        weight.grad = grad.to_sparse() if kind is torch.optim.SparseAdam else grad
        optimizer.step()
        with torch.no_grad():
            weight.copy_(old + factor * (weight - old))
    return weight.detach()
