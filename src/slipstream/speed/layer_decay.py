"""Speed option: learning rates that decrease from a model's head to its input (layer-wise decay).

Clark et al. 2020 (ELECTRA, arXiv 2003.10555), Bao et al. 2021 (BEiT, arXiv 2106.08254).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.model.blocks import find_blocks, find_modules
from slipstream.optim import OptimWrapper
from slipstream.step.parts import StepPart
from slipstream.typecheck import Rule

__all__ = ["DecayLayers", "LayerDecayOptions", "layer_factors"]

_KEY = "layer_decay"
# Optimizers whose update is not proportional to the learning rate, or whose state contains weights.
_UNSUPPORTED = re.compile("Adafactor|Rprop|ASGD|LBFGS|Lookahead|.*ScheduleFree")


@dataclass(frozen=True)
class LayerDecayOptions:
    """Options of `layer_decay=dict(...)`; True selects the defaults, and a number sets the decay."""

    shorthand: ClassVar = "decay"

    decay: Annotated[float, Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")] = 0.75
    """Ratio of a layer's learning rate to that of the next layer, in (0, 1]."""
    layers: list[str] | None = None
    """The layers from input to output, by name (with the wildcards `*` and `?`) or class; each matching module is one
    layer. The default is the outermost repeated blocks of the model."""

    def part(self, model: nn.Module, optim: OptimWrapper) -> StepPart:
        """Return the step part that scales the updates.

        Raises:
            ConfigError: the update of the optimizer is not proportional to the learning rate, or see `layer_factors`.
        """
        optimizer = getattr(optim.optimizer, "optim", optim.optimizer)  # ZeRO stores its optimizer as `optim`
        for name in (kind.__name__ for kind in type(optimizer).__mro__):
            if _UNSUPPORTED.match(name):
                message = f"does not support {name}, whose update is not proportional to the learning rate"
                raise ConfigError(message, _KEY)
        factors = layer_factors(model, self)
        return DecayLayers({param: factors[name] for name, param in model.named_parameters()})


class DecayLayers(StepPart):
    """Scales the update of each parameter by a factor: `previous + factor * (updated - previous)`.

    This is a step with `factor` times the learning rate, including weight decay. The learning rates in the parameter
    groups do not change.

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
    (such as a head) have a factor of 1. A parameter between two layers belongs to the layer before it. Layers without
    parameters are not counted. The result is in the order of `model.named_parameters()`.

    Raises:
        ConfigError: the model has no repeated blocks, a pattern matches no module, or no layer has parameters.
    """
    path = f"{_KEY}.layers"
    if options.layers:
        found = (module for name in options.layers for module in find_modules(model, [name], path))
        blocks = list(dict.fromkeys(found))  # in the order of the list
    else:
        blocks = find_blocks(model, None, path)
    layers = [block for block in blocks if any(True for _ in block.parameters())]
    if not layers:
        raise ConfigError("no layer has parameters; list layers with parameters", path)
    numbers = {param: number for number, layer in enumerate(layers, 1) for param in layer.parameters()}
    names, params = zip(*model.named_parameters(), strict=True)
    indices = [numbers.get(param) for param in params]
    before = list(accumulate(indices, lambda last, number: last if number is None else number, initial=0))[1:]
    last = max(i for i, number in enumerate(indices) if number is not None)
    end = len(layers) + 1
    depths = [end - (number or 0) if i <= last else 0 for i, number in enumerate(before)]
    return {name: options.decay**depth for name, depth in zip(names, depths, strict=True)}
