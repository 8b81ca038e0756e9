"""Capabilities of the machine and the model, and the options that `speed='auto'` enables for them.

`auto` enables only options that improve speed and keep the results within the documented tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Capabilities", "Choice", "choose"]


@dataclass(frozen=True)
class Capabilities:
    """Properties of the machine, the run and the model that determine a plan.

    Attributes:
        device: device type: `cpu`, `cuda`, `npu`, `xpu`, `mps`.
        capability: compute capability of an NVIDIA GPU; (0, 0) for other devices.
        bf16: whether the device supports bfloat16 without emulation.
        torchao: whether torchao is installed.
        world_size: number of processes.
        convolutions: fraction of the model's parameters that belong to 2-d convolutions, from 0 to 1.
        plain_wrapper: whether the optimizer wrapper's precision can still be set.
        deterministic: whether only deterministic algorithms are allowed.
    """

    device: str = "cpu"
    capability: tuple[int, int] = (0, 0)
    bf16: bool = False
    torchao: bool = False
    world_size: int = 1
    convolutions: float = 0.0
    plain_wrapper: bool = True
    deterministic: bool = False

    @classmethod
    def here(cls, device: str, model: nn.Module, **run: bool | int) -> Capabilities:
        """Return the capabilities of this machine; `run` sets `world_size`, `plain_wrapper` and `deterministic`."""
        from importlib.util import find_spec

        nvidia = device == "cuda" and torch.version.hip is None
        convolutions = {p for m in model.modules() if isinstance(m, nn.Conv2d) for p in m.parameters()}
        sizes = {param: 0 if is_lazy(param) else param.numel() for param in model.parameters()}
        return cls(
            device=device,
            capability=torch.cuda.get_device_capability() if nvidia else (0, 0),
            bf16=_supports_bf16(device),
            torchao=find_spec("torchao") is not None,
            convolutions=sum(map(sizes.__getitem__, convolutions)) / max(sum(sizes.values()), 1),
            **run,  # type: ignore[arg-type]
        )

    @property
    def tf32(self) -> bool:
        """Whether the GPU supports TensorFloat-32."""
        return self.capability >= (8, 0)


def _supports_bf16(device: str) -> bool:
    """Return whether the accelerator supports bfloat16 without emulation."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    supports = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return device not in ("cpu", "mps") and supports is not None and bool(supports())


class Choice(NamedTuple):
    """An option that `auto` enables or leaves disabled, the reason, and the value of the option in the plan."""

    option: str
    reason: str
    value: Any = None
    enabled: bool = True


def choose(capabilities: Capabilities) -> Iterator[Choice]:
    """Yield the choices for this device and model, each with its reason."""
    device, convolutional = capabilities.device, capabilities.convolutions > 0.5
    if capabilities.bf16 and capabilities.plain_wrapper:
        yield Choice("precision", "this device supports bf16", "bf16")
    elif capabilities.tf32:
        yield Choice("precision", "this device supports tf32", "tf32")
    elif device == "cpu":
        reason = "bf16 is faster than float32 on only a few CPUs; measure precision='bf16'"
        yield Choice("precision", reason, enabled=False)
    else:
        reason = f"bf16 and tf32 are not known to be faster on this {device} device"
        yield Choice("precision", reason, enabled=False)
    yield Choice(
        "fused", "torch's fused kernels, if the optimizer has them, compute the same update in fewer passes"
    )
    if device != "cpu":
        yield Choice("prefetch", "copies the next batches to the device during the step", 2)
    if device in ("cuda", "xpu") and convolutional:
        share = f"{capabilities.convolutions:.0%} of the parameters belong to 2-d convolutions"
        yield Choice("channels_last", share, True)
    if device == "npu" and convolutional:
        yield Choice("channels_last", "Ascend uses its own memory format for convolutions", enabled=False)
    if device == "cuda" and convolutional and not capabilities.deterministic:
        yield Choice("cudnn_benchmark", "cuDNN selects the fastest convolution algorithms", True)
    gain = ", but reduces the step time by 10% to 40%" * (device == "cpu" and convolutional)
    yield Choice("compile", f"compilation can take minutes{gain}; try compile=True", enabled=False)
