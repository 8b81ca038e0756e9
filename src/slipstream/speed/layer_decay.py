"""Speed option: learning rates that fall from the head to the input of a model (layer-wise decay).

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

from slipstream.config import options
from slipstream.errors import ConfigError
from slipstream.model.wrappers.fully_sharded import repeated_blocks
from slipstream.speed.blocks import named_blocks
from slipstream.step.parts import StepPart

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper

__all__ = ["DecayLayers", "LayerDecayOptions", "layer_factors", "read_layer_decay", "scales_with_lr"]

_KEY = "layer_decay"
_KERNELS = ("params", "param_names", "lr", "fused", "foreach", "capturable", "differentiable")
"""Settings of a parameter group that do not change what the optimizer computes, and those that the probe sets."""


@dataclass(frozen=True)
class LayerDecayOptions:
    """`layer_decay=dict(...)`; True gives the defaults, a number the decay."""

    decay: float = 0.75
    """Factor of the learning rate from one layer to the layer before it; in (0, 1]."""
    layers: list[str] | None = None
    """The layers from input to output, by name (with `*` and `?`) or class; each module that a word matches is one
    layer. By default the model's repeated blocks, the outermost where they contain one another."""

    def __post_init__(self) -> None:
        """Refuse factors outside (0, 1] and an empty list."""
        if not 0 < self.decay <= 1:
            raise ConfigError(f"must be above 0 and at most 1, not {self.decay}", "decay")
        if self.layers is not None and not self.layers:
            raise ConfigError("names no layer: remove it to decay over the model's repeated blocks", "layers")

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the part of the step that shortens the updates.

        Raises:
            ConfigError: no block of the model repeats, a word matches no module, or the optimizer's update is not
                proportional to its learning rate.
        """
        optimizer = optim.optimizer
        if not scales_with_lr(optimizer):
            raise ConfigError(
                f"the update of {type(optimizer).__name__} is not known to be proportional to its learning rate: use "
                "another optimizer, or give each layer its own lr with optim_wrapper.paramwise_cfg",
                _KEY,
            )
        factors = layer_factors(model, self)
        return DecayLayers({param: factors[name] for name, param in model.named_parameters()})


def read_layer_decay(value: Any) -> LayerDecayOptions | None:
    """Read `layer_decay`: True, False, None, the decay as a number, or a dict.

    Raises:
        ConfigError: anything else, an unknown option, or a decay outside (0, 1].
    """
    if value is None or value is False:
        return None
    if isinstance(value, float):
        value = {"decay": value}
    return options(LayerDecayOptions, {} if value is True else value, _KEY)


class DecayLayers(StepPart):
    """Shorten the update of each parameter by a factor: `previous + factor * (updated - previous)`.

    This equals an optimizer step with `factor` times the learning rate, weight decay included, for every optimizer
    whose update is proportional to its learning rate (`scales_with_lr`). Schedulers know nothing of it.

    Args:
        factors: the factor of each parameter; parameters that are missing keep their whole update.
    """

    needs_previous = True

    def __init__(self, factors: Mapping[nn.Parameter, float]) -> None:
        self.factors = {param: factor for param, factor in factors.items() if factor != 1.0}

    def after_update(self, params: Sequence[nn.Parameter], previous: Sequence[Tensor]) -> None:
        """Shorten the updates in place."""
        for param, old in zip(params, previous, strict=True):
            if param in self.factors:
                param.copy_(torch.lerp(old, param.detach(), self.factors[param]))


def layer_factors(model: nn.Module, how: LayerDecayOptions) -> dict[str, float]:
    """Return the factor of each parameter by name: `decay ** (number of layers from it to the end of the model)`.

    As in BEiT, the last layer has `decay`, the layer before it `decay ** 2`; parameters that the model holds before its
    first layer (an embedding) have the smallest factor, those after the last one (a head) 1. A parameter between two
    layers belongs to the one before it. What comes first is decided by the order in which the model holds its modules.

    Raises:
        ConfigError: no block repeats, or a word matches no module.
    """
    layers = _layers(model, how.layers)
    numbers = {param: number for number, layer in enumerate(layers, 1) for param in layer.parameters()}
    names, params = zip(*model.named_parameters(), strict=True)
    own = [numbers.get(param) for param in params]
    before = list(accumulate(own, lambda last, number: last if number is None else number, initial=0))[1:]
    last = max((i for i, number in enumerate(own) if number is not None), default=-1)
    end = len(layers) + 1
    depths = [end - (number or 0) if i <= last else 0 for i, number in enumerate(before)]
    return {name: how.decay**depth for name, depth in zip(names, depths, strict=True)}


def _layers(model: nn.Module, words: list[str] | None) -> list[nn.Module]:
    """Return the layers from input to output."""
    if words is not None:
        found = (module for word in words for module in named_blocks(model, [word], f"{_KEY}.layers"))
        return list(dict.fromkeys(found))
    blocks = set(repeated_blocks(model)) - {model}
    inner = {module for block in blocks for module in block.modules() if module is not block}
    layers = [module for module in model.modules() if module in blocks - inner]
    if not layers:
        raise ConfigError(
            "no block of the model repeats: name its layers from input to output", f"{_KEY}.layers"
        )
    return layers


def scales_with_lr(optimizer: Optimizer) -> bool:
    """Say whether half of an optimizer's update is its update with half of the learning rate, with its settings.

    The optimizer's class is tried on a small float64 weight, with a usual and with a large learning rate: some bound
    the length of a step (Adafactor, Rprop). A class that cannot be built from the settings in `param_groups` is
    answered with False.
    """
    inner: Optimizer = getattr(
        optimizer, "optim", optimizer
    )  # ZeroRedundancyOptimizer steps another optimizer
    known = inspect.signature(type(inner)).parameters
    for group in inner.param_groups:
        settings = {k: v for k, v in group.items() if k in known and k not in _KERNELS}
        for lr in (0.1, 100.0):
            try:
                halved, half = _try(type(inner), lr, settings, 0.5), _try(type(inner), lr / 2, settings, 1.0)
            except Exception:  # whatever a foreign class raises
                return False
            if not (halved - half).abs().max() <= 1e-9 * half.abs().max():
                return False
    return True


def _try(kind: Callable[..., Optimizer], lr: float, settings: Mapping[str, Any], factor: float) -> Tensor:
    """Return a weight after a few steps, each shortened by `factor`."""
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
