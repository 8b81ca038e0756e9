"""Options that `speed='auto'` enables: they keep results within the documented tolerance and improve speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.speed.capabilities import Capabilities
from slipstream.speed.precision import PrecisionOptions

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """An option that `auto` enables or leaves off, and the reason."""

    option: str
    why: str
    value: Any = None
    """Value of the option in the plan."""
    on: bool = True


def choose(capabilities: Capabilities) -> Iterator[Choice]:
    """Yield the choices for this device and model, each with its reason."""
    convolutional = capabilities.convolutions > 0.5
    yield _precision(capabilities)
    yield Choice(
        "fused", "torch's fused kernels compute the same update in fewer passes, if the optimizer has them"
    )
    if capabilities.device != "cpu":
        yield Choice("prefetch", "copies batches to the device during the step", 2)
    if capabilities.device == "cuda" and convolutional:
        yield Choice(
            "channels_last", f"{capabilities.convolutions:.0%} of the parameters are 2-d convolutions", True
        )
        if not capabilities.deterministic:
            yield Choice("cudnn_benchmark", "cuDNN selects the fastest convolution algorithms", True)
    yield _compile(capabilities, convolutional)


def _precision(capabilities: Capabilities) -> Choice:
    if capabilities.bf16 and capabilities.plain_wrapper:
        return Choice("precision", "this device supports bf16", PrecisionOptions("bf16"))
    if capabilities.tf32:
        return Choice("precision", "this device supports tf32", PrecisionOptions("tf32"))
    if capabilities.device == "cpu":
        why = "bf16 is faster than float32 on few CPUs; measure precision='bf16'"
    else:
        why = f"no speedup from bf16 or tf32 is known for this {capabilities.device} device"
    return Choice("precision", why, on=False)


def _compile(capabilities: Capabilities, convolutional: bool) -> Choice:
    if capabilities.device == "cpu" and convolutional:
        why = "compilation takes minutes, then convolutions take 0.6 to 0.9 of the time; try compile=True"
        return Choice("compile", why, on=False)
    return Choice("compile", "compilation takes a minute or more; measure compile=True", on=False)
