"""Count operations and activations with torch's FLOP counter and MMEngine's formula for each operator.

MMEngine traces the model instead, so some results differ. Attention that calls `scaled_dot_product_attention` is
counted here but not by MMEngine. Adaptive average pooling to one value per channel is counted by MMEngine but not
here. Operators are named as in torch's dispatcher (`addmm` for a linear layer).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from slipstream.errors import ConfigError
from slipstream.tables import make_table, table_text

__all__ = [
    "ActivationAnalyzer",
    "FlopAnalyzer",
    "activation_count",
    "flop_count",
    "parameter_count",
    "parameter_count_table",
]

Handle = Callable[..., int]
aten = torch.ops.aten


def _raw(function: Handle) -> Handle:
    """Mark a function that receives the arguments of an operator instead of their shapes."""
    function._get_raw = True  # type: ignore[attr-defined]
    return function


def _numel(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple | list) else output
    return tensor


@_raw
def _batch_norm(x: Tensor, weight: Tensor | None, *args: Any, out_val: Any, **kwargs: Any) -> int:
    training = True in [value for value in args if isinstance(value, bool)]
    return x.numel() * ((4 if training else 1) + (weight is not None))


@_raw
def _layer_norm(x: Tensor, shape: Any, weight: Tensor | None, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return x.numel() * (4 + (weight is not None))


@_raw
def _group_norm(x: Tensor, weight: Tensor | None, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return x.numel() * (4 + (weight is not None))


@_raw
def _count_input(x: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> int:
    return x.numel()


@_raw
def _count_output(*args: Any, out_val: Any, **kwargs: Any) -> int:
    return _numel(_first(out_val))


@_raw
def _count_output_times_four(*args: Any, out_val: Any, **kwargs: Any) -> int:
    return 4 * _numel(_first(out_val))


def _halve(count: Handle) -> Handle:
    """Return a function that counts a multiplication and an addition as one operation."""

    @_raw
    def halved(*args: Any, **kwargs: Any) -> int:
        return count(*args, **kwargs) // 2

    return halved


def _operation_handles() -> dict[Any, Handle]:
    return {
        **{operator: _halve(count) for operator, count in flop_registry.items()},
        aten.native_batch_norm: _batch_norm,
        aten.cudnn_batch_norm: _batch_norm,
        aten._native_batch_norm_legit: _batch_norm,
        aten._native_batch_norm_legit_no_training: _batch_norm,
        aten.native_layer_norm: _layer_norm,
        aten.native_group_norm: _group_norm,
        aten.upsample_nearest2d: _count_output,
        aten.upsample_bilinear2d: _count_output_times_four,
        aten.grid_sampler_2d: _count_output_times_four,
        aten._adaptive_avg_pool2d: _count_input,
    }


def _activation_handles() -> dict[Any, Handle]:
    operators = (aten.convolution, aten._convolution, aten.addmm, aten.mm, aten.bmm, aten.baddbmm)

    @_raw
    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    return {**dict.fromkeys(flop_registry, zero), **dict.fromkeys(operators, _count_output)}


class _Analyzer:
    """Base class for analyzers. An analyzer calls the model once, without gradients, and counts operations or
    activations for each module and operator.

    Args:
        model: the model.
        inputs: a tuple of positional arguments for the call, or a single argument.
    """

    _handles: ClassVar[Callable[[], dict[Any, Handle]]]

    def __init__(self, model: nn.Module, inputs: Tensor | tuple[Any, ...]) -> None:
        self._model = model
        self._inputs = inputs if isinstance(inputs, tuple) else (inputs,)

    def total(self, module_name: str = "") -> int:
        """Return the total count for a module (by default, for the whole model)."""
        return sum(self.by_operator(module_name).values())

    def by_operator(self, module_name: str = "") -> Counter[str]:
        """Return the count for each operator in a module.

        Raises:
            ConfigError: if the model has no module with this name.
        """
        if module_name not in self._counts:
            raise ConfigError(f"the model has no module '{module_name}'; see by_module() for all names")
        return self._counts[module_name]

    def by_module(self) -> Counter[str]:
        """Return the count for each module."""
        return Counter({name: sum(counts.values()) for name, counts in self._counts.items()})

    def by_module_and_operator(self) -> dict[str, Counter[str]]:
        """Return the count for each operator in each module."""
        return dict(self._counts)

    @cached_property
    def _counts(self) -> dict[str, Counter[str]]:
        counter = FlopCounterMode(display=False, custom_mapping=type(self)._handles())
        with torch.no_grad(), counter:
            self._model(*self._inputs)
        flop_counts = counter.get_flop_counts()
        root = type(self._model).__name__
        counts: dict[str, Counter[str]] = {}
        for name, _ in self._model.named_modules():
            counts[name] = Counter()
            for operator, count in flop_counts.get(f"{root}.{name}" if name else "Global", {}).items():
                counts[name] += Counter({_name(operator): int(count)})  # `+=` removes zero counts
        return counts


_NAMES = {
    "convolution": "conv",
    "batch_norm_legit": "batch_norm",
    "batch_norm_legit_no_training": "batch_norm",
}


def _name(operator: Any) -> str:
    name = str(operator).removeprefix("aten.").removeprefix("_").removeprefix("native_")
    return _NAMES.get(name, name)


class FlopAnalyzer(_Analyzer):
    """Count operations; a multiplication followed by an addition is one operation.

    Args:
        model: the model.
        inputs: a tuple of positional arguments for the call, or a single argument.
    """

    _handles = staticmethod(_operation_handles)


class ActivationAnalyzer(_Analyzer):
    """Count the elements in the outputs of convolutions and matrix products.

    Args:
        model: the model.
        inputs: a tuple of positional arguments for the call, or a single argument.
    """

    _handles = staticmethod(_activation_handles)


def flop_count(
    model: nn.Module, inputs: tuple[Any, ...], supported_ops: Mapping[str, Any] | None = None
) -> tuple[defaultdict[str, float], Counter[str]]:
    """Return the operation count of each operator, in units of 10^9, and an empty Counter.

    Raises:
        ConfigError: if `supported_ops` is set, because its functions require a trace of the model.
    """
    return _scaled_counts(FlopAnalyzer(model, inputs), 1e9, supported_ops), Counter()


def activation_count(
    model: nn.Module, inputs: tuple[Any, ...], supported_ops: Mapping[str, Any] | None = None
) -> tuple[defaultdict[str, float], Counter[str]]:
    """Return the activation count of each operator, in units of 10^6, and an empty Counter.

    Raises:
        ConfigError: see `flop_count`.
    """
    return _scaled_counts(ActivationAnalyzer(model, inputs), 1e6, supported_ops), Counter()


def _scaled_counts(
    analyzer: _Analyzer, unit: float, supported_ops: Mapping[str, Any] | None
) -> defaultdict[str, float]:
    if supported_ops:
        raise ConfigError("is not supported, because the model is not traced; remove it", "supported_ops")
    return defaultdict(float, {name: count / unit for name, count in analyzer.by_operator().items()})


def parameter_count(model: nn.Module) -> defaultdict[str, int]:
    """Return the number of elements in each parameter, in each module and, under the key "", in the whole model."""
    counts: defaultdict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        for length in range(len(parts) + 1):
            counts[".".join(parts[:length])] += parameter.numel()
    return counts


def parameter_count_table(model: nn.Module, max_depth: int = 3) -> str:
    """Return a table with the shape of each parameter and the number of parameter elements in each module.

    Args:
        model: the model.
        max_depth: maximum depth of the names in the table.
    """
    from slipstream.openmmlab.mmengine.analysis.print_helper import _format_size

    counts = parameter_count(model)
    shapes = {name: str(tuple(parameter.shape)) for name, parameter in model.named_parameters()}
    rows = [["model", _format_size(counts.pop(""))]]
    for name, count in counts.items():
        depth = name.count(".") + 1
        if depth <= max_depth:
            rows.append([" " * depth + name, " " * depth + shapes.get(name, _format_size(count))])
    return table_text(make_table(["name", "#elements or shape"], rows))
