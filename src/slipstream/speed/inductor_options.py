"""Inductor's options for the step as one graph, by device."""

from __future__ import annotations

from typing import Any

from slipstream.speed.conv_layout import LayOutConvolutions

__all__ = ["inductor_options"]


def inductor_options(device_type: str) -> dict[str, Any]:
    """Return inductor's options for a step on this device, as `torch.compile(options=...)` takes them.

    Measured on one core of an AMD EPYC with AVX2, torch 2.13, in CPU time, batches of 4x3x64x64, against a loop in
    channels_last (benchmarks/one_graph.py). PP-LiteSeg-T: inductor's own choice 1.18, with model and batch in
    channels_last 0.86, these options 0.66. With these options STDC1 0.68, RegSeg 0.74, SegFormer-B0 0.81,
    DDRNet-23-slim 0.62.
    """
    if device_type != "cpu":
        return {}
    return {
        # Inductor's own layouts apply to the forward pass alone: it computes convolutions in channels_last, but gives
        # `convolution_backward` its operands with their eager strides, and stores and transposes what both need.
        # The pass assigns strides instead, and inductor follows strides if this option is off.
        "layout_optimization": False,
        "post_grad_custom_pre_pass": LayOutConvolutions(),
    }
