"""Inputs to model FLOPs utilization: operations per training step, and the peak throughput of accelerators."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from slipstream.checkpoint import get_random_state, set_random_state
from slipstream.errors import ModelError
from slipstream.sharding import is_sharded
from slipstream.speed.activation_checkpointing import is_recomputed
from slipstream.speed.precision import Precision

__all__ = ["PEAKS", "Accelerator", "peak_flops", "training_flops", "without_data"]


@dataclass(frozen=True)
class Accelerator:
    """The peak throughput of an accelerator, from its manufacturer's data sheet."""

    words: str
    """The words that the device name must contain, such as `H100 PCIe`."""
    teraflops: Mapping[Precision, float]
    """Peak throughput of dense matrix products, in 10^12 operations/s, by precision; unknown values are omitted."""
    source: str


_SHEET = "NVIDIA {} data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture white paper"
PEAKS = (
    Accelerator("B200", {"fp8": 4500, "bf16": 2250, "fp16": 2250}, "NVIDIA HGX B200 data sheet"),
    Accelerator("H200 NVL", {"fp8": 1670, "bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}, _SHEET.format("H200")),
    Accelerator("H200", {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}, _SHEET.format("H200")),
    Accelerator("H100 NVL", {"fp8": 1670, "bf16": 835, "fp16": 835, "tf32": 417, "fp32": 60}, _SHEET.format("H100")),
    Accelerator("H100 PCIe", {"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51}, _SHEET.format("H100")),
    Accelerator("H100", {"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494, "fp32": 67}, _SHEET.format("H100")),
    Accelerator("A100", {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}, _SHEET.format("A100")),
    Accelerator("A40", {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}, _SHEET.format("A40")),
    Accelerator("A30", {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3}, _SHEET.format("A30")),
    Accelerator("A10G", {"bf16": 70, "fp16": 70, "tf32": 35}, _SHEET.format("A10G")),
    Accelerator("A10", {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}, _SHEET.format("A10")),
    Accelerator("L40S", {"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}, _SHEET.format("L40S")),
    Accelerator("L40", {"fp8": 362, "bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5}, _SHEET.format("L40")),
    Accelerator("L4", {"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}, _SHEET.format("L4")),
    Accelerator("RTX 4090", {"fp8": 330, "bf16": 165, "fp16": 165, "tf32": 82.6, "fp32": 82.6}, _ADA),
    Accelerator("RTX 3090", {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}, _AMPERE),
    Accelerator("V100 SXM2", {"fp16": 125, "fp32": 15.7}, _SHEET.format("V100")),
    Accelerator("V100 PCIE", {"fp16": 112, "fp32": 14}, _SHEET.format("V100")),
    Accelerator("T4", {"fp16": 65, "fp32": 8.1}, _SHEET.format("T4")),
    Accelerator("MI300X", {"fp8": 2615, "bf16": 1307, "fp16": 1307, "tf32": 653.7, "fp32": 163.4},
                "AMD Instinct MI300X data sheet"),
)  # fmt: skip
"""Known accelerators. If several entries match a device name, the entry with the most words applies. For GeForce cards,
the 16-bit and 8-bit values assume accumulation in float32, which PyTorch uses."""

_VARIANT_WORDS = {"laptop", "mobile", "max", "mig", "d", "ti", "super", "ada"}
"""If a device name contains one of these words, the device may be a variant with a different peak throughput, so
`peak_flops` returns None."""


def peak_flops(device_name: str, precision: Precision) -> tuple[float, str] | None:
    """Return the peak throughput of a device in operations per second, and its source, or None if it is unknown.

    Args:
        device_name: the name that torch reports, such as `NVIDIA H100 80GB HBM3`.
        precision: the precision of matrix products and convolutions.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _VARIANT_WORDS:
        return None
    known = [each for each in PEAKS if set(each.words.lower().split()) <= words]
    best = max(known, key=lambda each: len(each.words.split()), default=None)
    if best is None or precision not in best.teraflops:
        return None
    return 1e12 * best.teraflops[precision], best.source


def without_data(inputs: Any) -> Any:
    """Return the inputs of a batch (nested dicts, lists and tuples) with tensors on the meta device, without data."""
    return tree_map_only(Tensor, _without_data, inputs)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def training_flops(
    model: nn.Module,
    inputs: Any,
    loss_of: Callable[[nn.Module, Any], Tensor],
    trained: Collection[nn.Parameter] | None = None,
) -> int:
    """Return the number of floating-point operations for the forward and backward passes on a batch.

    Only matrix products, convolutions and attention are counted, with the formulas of torch's `FlopCounterMode`. The
    model is copied to the meta device. No values are computed, and the model, its gradients and the random state do not
    change. Blocks that the `activation_checkpointing` option recomputes are counted once.

    Args:
        model: the model, unwrapped.
        inputs: the inputs of a batch from `without_data`.
        loss_of: `loss_of(model, inputs)` returns the loss to minimize; it is called with the copies.
        trained: the parameters whose gradients the training step computes; None for all that require a gradient.

    Raises:
        ModelError: the parameters are sharded.
        Exception: the model cannot be copied, or cannot run without data, because it reads values of tensors.
    """
    if any(is_sharded(param) for param in model.parameters()):
        raise ModelError("the parameters of the model are sharded")
    wanted = set(model.parameters() if trained is None else trained)
    memo: dict[int, Any] = {id(buffer): _without_data(buffer) for buffer in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(_without_data(param).detach(), param in wanted and param.requires_grad)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if is_recomputed(module):
            recomputed: Any = module.forward
            module.forward = recomputed.args[1]
    state = get_random_state()
    try:
        with torch.enable_grad(), FlopCounterMode(display=False) as counter:
            loss_of(copied.train(), inputs).backward()
    finally:
        set_random_state(state)
    return int(counter.get_total_flops())
