"""Speed option: the floating-point precision of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from slipstream.config import read_value
from slipstream.errors import ConfigError

__all__ = [
    "AUTOCAST_DTYPES", "Precision", "avoid_incorrect_kernels", "convert_to_fp8", "read_precision",
    "tf32",
]  # fmt: skip

# The precision of a step; `fp32` leaves torch's settings unchanged.
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
# The autocast dtypes; `fp8` uses bfloat16 outside float8 matrix products.
AUTOCAST_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
_FP8_TILE = 16  # sizes in float8 matrix products must be multiples of this number


def read_precision(value: Any) -> Precision:
    """Read `precision`.

    Raises:
        ConfigError: the value is neither one of the five names nor an alias (such as `bfloat16`).
    """
    name = _ALIASES.get(value, value) if isinstance(value, str) else value
    return read_value(Precision, name, "precision")


@contextmanager
def tf32() -> Iterator[None]:
    """Enable TF32 (10 stored mantissa bits) for float32 matrix products and convolutions within the context.

    TF32 has no effect on devices other than NVIDIA GPUs. PyTorch has two interfaces for this setting. If it was changed
    through one interface, reading it through the other raises an error. Inductor uses the older interface, so this
    function also uses it, unless the newer interface (`fp32_precision`) is already in use.
    """
    cudnn, mkldnn = cast("Any", torch.backends.cudnn), cast("Any", torch.backends.mkldnn)
    backends: list[Any] = [mkldnn.matmul, torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    settings = [backend.fp32_precision for backend in backends]
    older: tuple[str, bool] | None = None
    try:
        older = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        torch.set_float32_matmul_precision("high")
        if settings[0] == "none":  # the line above also enabled TF32 on CPUs
            mkldnn.matmul.fp32_precision = "none"
        cudnn.allow_tf32 = True
    except RuntimeError:
        for backend in backends[1:]:
            backend.fp32_precision = "tf32"
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            cudnn.allow_tf32 = older[1]
        # The lines above replace 'none' (inherit torch.backends.fp32_precision) with 'ieee'.
        for backend, setting in zip(backends, settings, strict=True):
            backend.fp32_precision = setting


def convert_to_fp8(model: nn.Module) -> int:
    """Convert the model's linear layers to float8 training (torchao), in place; return the number of converted layers.

    Layers whose sizes are not multiples of 16 are skipped. Parameters and their names do not change. The scales (one
    per tensor) are computed in each step, so checkpoints have no additional entries.

    Raises:
        ConfigError: no layer can be converted.
    """
    names = {
        name
        for name, module in model.named_modules()
        if name and type(module) is nn.Linear and not any(size % _FP8_TILE for size in module.weight.shape)
    }
    if not names:
        raise ConfigError(
            f"'fp8' has no effect: {type(model).__name__} has no nn.Linear whose sizes are multiples of {_FP8_TILE}; "
            "use 'bf16'",
            "precision",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # In the matrix product for the weights' gradient, the inner dimension is the batch size, which can be any number.
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda module, name: name in names, config=config)
    return len(names)


def avoid_incorrect_kernels(model: nn.Module) -> None:
    """Let convolutions in bf16 on a CPU compute in float32 where torch's weight gradient would be wrong.

    With AVX-512, oneDNN's bf16 kernel reads uninitialized memory, or writes beyond the end of a buffer, if the images
    are narrower than the stride, or for 3-d convolutions if the kernel exceeds the depth or height (torch 2.13; found
    by comparing 30,000 random convolutions with float64).
    """
    for module in model.modules():
        if not isinstance(module, _ConvNd) or isinstance(module, _ConvTransposeNd):
            continue
        if not isinstance(module._conv_forward, partial):  # the model may be prepared several times
            sizes = module.stride, module.kernel_size
            module._conv_forward = partial(_convolve, module._conv_forward, sizes)  # type: ignore[method-assign]


def _convolve(
    forward: Any, sizes: Sequence[tuple[int, ...]], input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    stride, kernel = sizes
    size = input.shape[-len(stride) :]
    narrow = size[-1] < stride[-1]
    if narrow or (len(size) == 3 and (kernel[0] > size[0] or kernel[1] > size[1])):
        with torch.autocast("cpu", enabled=False):
            bias = None if bias is None else bias.float()
            result: Tensor = forward(input.float(), weight.float(), bias)
    else:
        result = forward(input, weight, bias)
    return result
