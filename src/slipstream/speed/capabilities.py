"""Capabilities of the machine, and properties of the run and the model that a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["Capabilities", "convolution_share"]


@dataclass(frozen=True)
class Capabilities:
    """Properties of the machine, the run and the model that a plan depends on."""

    device: str = "cpu"
    """Kind of device: `cpu`, `cuda`, `npu`, `xpu`, `mps`."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of an NVIDIA GPU; (0, 0) elsewhere."""
    bf16: bool = False
    """Whether the device supports bfloat16 without emulation."""
    torchao: bool = False
    """Whether torchao is installed."""
    world_size: int = 1
    """Number of processes."""
    convolutions: float = 0.0
    """Fraction of the model's parameters that are weights of 2-d convolutions."""
    plain_wrapper: bool = True
    """Whether the precision of the optimizer wrapper can still be set."""
    deterministic: bool = False
    """Whether only deterministic algorithms are allowed."""

    @classmethod
    def here(cls, device: str, model: nn.Module, **run: bool | int) -> Capabilities:
        """Return the capabilities of this machine; `run` sets `world_size`, `plain_wrapper` and `deterministic`."""
        from importlib.util import find_spec

        nvidia = device == "cuda" and torch.version.hip is None
        return cls(
            device=device,
            capability=torch.cuda.get_device_capability() if nvidia else (0, 0),
            bf16=device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
            torchao=find_spec("torchao") is not None,
            convolutions=convolution_share(model),
            **run,  # type: ignore[arg-type]
        )

    @property
    def tf32(self) -> bool:
        """Whether the GPU supports TensorFloat-32."""
        return self.capability >= (8, 0)


def convolution_share(model: nn.Module) -> float:
    """Return the fraction of a model's parameters that are weights of 2-d convolutions, from 0 to 1."""
    total = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    convolutions = {
        id(m.weight): m.weight.numel()
        for m in model.modules()
        if isinstance(m, nn.Conv2d) and not is_lazy(m.weight)
    }
    return sum(convolutions.values()) / total if total else 0.0
