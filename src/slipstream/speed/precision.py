"""Option: in which precision a step computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from slipstream.errors import ConfigError, did_you_mean

__all__ = ["Precision", "PrecisionOptions", "convert_to_fp8", "read_precision", "tf32"]

Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
_WORDS: dict[str, Precision] = {
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
    "float8": "fp8",
}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_FP8_TILE = 16  # what a float8 product's sizes must be multiples of


@dataclass(frozen=True)
class PrecisionOptions:
    """`precision='bf16'`."""

    name: Precision
    """`fp32` (torch's own switches stay as they are), `tf32`, `bf16`, `fp16` or `fp8`."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, or None for none; beside its float8 products an `fp8` step computes in bfloat16."""
        return _AUTOCAST.get(self.name)


def read_precision(value: Any) -> PrecisionOptions | None:
    """Read `precision` as a configuration has it; None leaves everything as it is.

    Raises:
        ConfigError: anything but the five words and torch's names for them (`bfloat16`, ...).
    """
    if value is None or isinstance(value, PrecisionOptions):
        return value
    if not isinstance(value, str) or value not in _WORDS:
        hint = did_you_mean(value, _WORDS) if isinstance(value, str) else ""
        raise ConfigError(
            f"must be one of {list(dict.fromkeys(_WORDS.values()))}, not {value!r}{hint}", "precision"
        )
    return PrecisionOptions(_WORDS[value])


@contextmanager
def tf32() -> Iterator[None]:
    """Let an NVIDIA GPU multiply float32 matrices, and convolve, with 10 bits of mantissa, as long as it lasts.

    Elsewhere nothing changes. Meanwhile torch refuses to be asked for the same things by their old names
    (`allow_tf32`, `get_float32_matmul_precision`).
    """
    cudnn: Any = torch.backends.cudnn
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = "tf32"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def convert_to_fp8(model: nn.Module) -> int:
    """Let the model's linear layers multiply in float8 (torchao), in place; return how many do.

    Layers whose sizes are no multiples of 16 stay as they are. Parameters stay the same tensors under the same
    names, and one scale for each tensor is found anew in each step, so that a checkpoint holds nothing else.

    Raises:
        ConfigError: the GPU cannot (it takes compute capability 8.9: Ada, Hopper or newer), torchao is not
            installed, or no layer is fit for it.
    """
    _check_fp8_hardware()
    if find_spec("torchao") is None:
        raise ConfigError("'fp8' needs torchao: pip install 'slipstream[fp8]'", "precision")
    fit = {name for name, module in model.named_modules() if name and _fits_fp8(module)}
    if not fit:
        raise ConfigError(
            f"'fp8' would change nothing: {type(model).__name__} has no nn.Linear whose sizes are multiples of "
            f"{_FP8_TILE}; take 'bf16'",
            "precision",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Of the weights' gradient the inner size is that of the batch, which may be anything.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in fit, config=config)
    return len(fit)


def _check_fp8_hardware() -> None:
    remedy = "take 'bf16'"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        raise ConfigError(f"'fp8' needs an NVIDIA GPU, and there is none here: {remedy}", "precision")
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        raise ConfigError(
            f"'fp8' needs a GPU of compute capability 8.9 or higher (Ada, Hopper), and "
            f"{torch.cuda.get_device_name()} has {capability[0]}.{capability[1]}: {remedy}",
            "precision",
        )


def _fits_fp8(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.in_features % _FP8_TILE == 0
        and module.out_features % _FP8_TILE == 0
    )
