"""Check that the optimizer still trains the model's parameters, on devices where `Module.to` replaces them."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.errors import ModelError
from slipstream.sharding import is_sharded

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["add_parameter_check", "keeps_parameters"]


def keeps_parameters(device: torch.device) -> bool:
    """Return whether `Module.to` keeps the Parameter objects when it moves a model between this device and the CPU."""
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))


def add_parameter_check(
    prepare: Callable[[Any], Any], model: nn.Module, optim: OptimWrapper
) -> Callable[[Any], Any]:
    """Return `prepare`, with an additional check for replaced parameters if `Module.to` may replace them.

    The check compares the identity of each trained parameter. Sharded models are not checked, because FSDP itself
    replaces their parameters.
    """
    params = list(optim.parameters())
    if any(map(is_sharded, params)) or all(map(keeps_parameters, {param.device for param in params})):
        return prepare
    trained = _TrainedParameters(model, optim)

    def checked(batch: Any) -> Any:
        trained.check()
        return prepare(batch)

    return checked


class _TrainedParameters:
    """The model parameters that the optimizer trains, and the modules that own them."""

    def __init__(self, model: nn.Module, optim: OptimWrapper) -> None:
        self._model, self._optim = model, optim
        self._device = next(optim.parameters()).device.type
        self._find()

    def _find(self) -> None:
        trained = set(map(id, self._optim.parameters()))
        self._owners = [
            (module._parameters, name)
            for module in self._model.modules()
            for name, param in module._parameters.items()
            if id(param) in trained
        ]
        self._params = [params[name] for params, name in self._owners]

    def check(self) -> None:
        """Check that no trained parameter has been replaced by a parameter that the optimizer does not train.

        Raises:
            ModelError: a parameter was replaced, and the optimizer does not contain the new parameter.
        """
        current = [params.get(name) for params, name in self._owners]
        if all(map(is_, current, self._params)):
            return
        trained = set(map(id, self._optim.parameters()))
        new = {id(param) for param in current if isinstance(param, Tensor) and param.requires_grad} - trained
        for name, param in self._model.named_parameters():
            if id(param) in new:
                raise ModelError(
                    f"the parameter '{name}' was replaced, and the optimizer does not contain the new parameter. "
                    f"model.to() replaces the parameters of models on {self._device}; move a copy instead, with "
                    "copy.deepcopy(model).to(...), or rebuild the optimizer and the training step"
                )
        self._find()
