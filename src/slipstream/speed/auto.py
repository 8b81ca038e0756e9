"""What `speed='auto'` switches on: what keeps the numbers within the stated tolerance and is known to pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slipstream.speed.capabilities import Capabilities
from slipstream.speed.precision import PrecisionOptions

__all__ = ["Choice", "choose"]


@dataclass(frozen=True)
class Choice:
    """An option that is switched on, or left off, and why."""

    option: str
    why: str
    value: Any = None
    """What the plan then holds."""
    on: bool = True


def choose(capabilities: Capabilities) -> Iterator[Choice]:
    """Yield what to switch on for this device and model, and what not, each with its reason."""
    convolutional = capabilities.convolutions > 0.5
    yield _precision(capabilities)
    yield Choice("fused", "where torch has fused kernels for the optimizer, they do the same in fewer passes")
    if capabilities.device != "cpu":
        yield Choice("prefetch", "batches are copied to the device beside the step", 2)
    if capabilities.device == "cuda" and convolutional:
        yield Choice(
            "channels_last", f"{capabilities.convolutions:.0%} of the parameters are 2-d convolutions", True
        )
        if not capabilities.deterministic:
            yield Choice("cudnn_benchmark", "cuDNN measures which of its convolutions is fastest", True)
    yield _compile(capabilities, convolutional)


def _precision(capabilities: Capabilities) -> Choice:
    if capabilities.bf16 and capabilities.plain_wrapper:
        return Choice("precision", "bf16 is supported by this device", PrecisionOptions("bf16"))
    if capabilities.tf32:
        return Choice("precision", "tf32 is supported by this device", PrecisionOptions("tf32"))
    if capabilities.device == "cpu":
        why = "few CPUs compute bf16 faster than float32: measure precision='bf16'"
    else:
        why = f"this {capabilities.device} device is not known to gain from bf16 or tf32"
    return Choice("precision", why, on=False)


def _compile(capabilities: Capabilities, convolutional: bool) -> Choice:
    if capabilities.device == "cpu" and convolutional:
        why = "minutes of compilation, then convolutions take 0.6 to 0.9 of the time: try compile=True in long runs"
        return Choice("compile", why, on=False)
    return Choice("compile", "compilation takes a minute or more: measure compile=True", on=False)
