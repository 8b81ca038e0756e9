"""Tables that show the complexity of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.openmmlab.mmengine.analysis.complexity_analysis import (
    ActivationAnalyzer,
    FlopAnalyzer,
    parameter_count,
)
from slipstream.tables import make_table, table_text

__all__ = ["_format_size", "get_model_complexity_info"]

_UNITS = ((1e14, 1e15, "P"), (1e11, 1e12, "T"), (1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))


def _format_size(x: int, sig_figs: int = 3, hide_zero: bool = False) -> str:
    """Format a number with a unit suffix; for example, `_format_size(25_600_000)` returns `25.6M`."""
    if hide_zero and x == 0:
        return ""
    for limit, unit, letter in _UNITS:
        if abs(x) > limit:
            return f"{x / unit:.{sig_figs}f}".rstrip("0").rstrip(".") + letter
    return str(x)


def get_model_complexity_info(
    model: nn.Module,
    input_shape: tuple[Any, ...] | None = None,
    inputs: Tensor | tuple[Any, ...] | None = None,
    show_table: bool = True,
    show_arch: bool = True,
) -> dict[str, Any]:
    """Count the operations, activations and parameters of a model.

    Args:
        model: the model.
        input_shape: shape of the input without the batch dimension, or a tuple of shapes.
        inputs: the inputs; an alternative to `input_shape`.
        show_table: include a table of all modules (`out_table`).
        show_arch: include the model structure (`out_arch`).

    Returns:
        A dict with the keys `flops`, `activations` and `params`, the same values as strings (`flops_str` and so on),
        `out_table` and `out_arch`.

    Raises:
        ConfigError: if both or neither of `input_shape` and `inputs` are set, or if `input_shape` is neither a
            tuple of integers nor a tuple of such tuples.
    """
    if (input_shape is None) == (inputs is None):
        raise ConfigError("set exactly one of input_shape and inputs")
    if inputs is None:
        assert input_shape is not None
        inputs = _random_inputs(input_shape, next(model.parameters()).device)
    flops, activations = FlopAnalyzer(model, inputs), ActivationAnalyzer(model, inputs)
    counts = {
        "flops": flops.total(),
        "activations": activations.total(),
        "params": parameter_count(model)[""],
    }
    return {
        **counts,
        **{f"{name}_str": _format_size(count) for name, count in counts.items()},
        "out_table": f"\n{_table(model, flops, activations)}" if show_table else "",
        "out_arch": f"\n{_structure(model, flops, activations)}" if show_arch else "",
    }


def _random_inputs(shape: tuple[Any, ...], device: torch.device) -> tuple[Tensor, ...]:
    shapes = (shape,) if all(isinstance(size, int) for size in shape) else shape
    if not all(isinstance(s, tuple) and all(isinstance(size, int) for size in s) for s in shapes):
        raise ConfigError(
            f"must be a tuple of integers, or a tuple of such tuples, not {shape}", "input_shape"
        )
    return tuple(torch.randn(1, *sizes, device=device) for sizes in shapes)


def _table(model: nn.Module, flops: FlopAnalyzer, activations: ActivationAnalyzer) -> str:
    parameters = parameter_count(model)
    rows = []
    for name, module in model.named_modules():
        indent = " " * (name.count(".") + 1) if name else ""
        counts = (parameters[name], flops.total(name), activations.total(name))
        rows.append([indent + (name or "model"), *(_format_size(count, hide_zero=True) for count in counts)])
        rows += [
            [f"{indent} {key}", str(tuple(parameter.shape)), "", ""]
            for key, parameter in module.named_parameters(recurse=False)
        ]
    return table_text(make_table(["module", "#parameters or shape", "#flops", "#activations"], rows))


def _structure(model: nn.Module, flops: FlopAnalyzer, activations: ActivationAnalyzer) -> str:
    parameters = parameter_count(model)

    def lines(module: nn.Module, name: str, depth: int) -> list[str]:
        label = f"({name.rpartition('.')[2]}): " if name else ""
        numbers = ", ".join(
            f"{quantity}: {_format_size(count)}"
            for quantity, count in (
                ("#params", parameters[name]),
                ("#flops", flops.total(name)),
                ("#acts", activations.total(name)),
            )
            if count
        )
        extra = ", ".join(text for text in (module.extra_repr(), numbers) if text)
        result = [f"{'  ' * depth}{label}{type(module).__name__}({extra})"]
        for key, child in module.named_children():
            result += lines(child, f"{name}.{key}" if name else key, depth + 1)
        return result

    return "\n".join(lines(model, "", 0))
