"""Inductor's options for compiled steps, models and blocks, by device type."""

from __future__ import annotations

from typing import Any

import torch

from slipstream.speed.conv_layout import LayOutConvolutions
from slipstream.speed.inductor_fixes import correct_tiled_additions

__all__ = ["inductor_options"]

# Torch reuses compiled code only if the options are equal, and two instances of a pass are not equal.
_LAYOUTS = LayOutConvolutions()


def inductor_options(device_type: str) -> dict[str, Any]:
    """Return inductor's options for code on this device type, in the format of `torch.compile(options=...)`.

    Measured CPU time of a step compiled as one graph, relative to an eager loop in channels_last
    (benchmarks/one_graph.py, one core of an AMD EPYC with AVX2, torch 2.13, batches of 4x3x64x64): PP-LiteSeg-T 1.18
    with inductor's default layouts, 0.86 with the model and the batch in channels_last, 0.66 with these options. Other
    networks with these options: STDC1 0.68, RegSeg 0.74, SegFormer-B0 0.81, DDRNet-23-slim 0.62.
    """
    if device_type != "cpu":
        # Inductor before torch 2.13 fails with an AssertionError if it tries to reorder the loops of foreach operations
        # that it has fused (pytorch/pytorch#176591).
        return {} if torch.__version__ >= "2.13" else {"loop_ordering_after_fusion": False}
    correct_tiled_additions()
    return {
        # Inductor's layout optimization covers only the forward pass. It computes convolutions in channels_last, but
        # passes operands with eager strides to `convolution_backward`, which causes extra copies and transposes.
        # LayOutConvolutions assigns strides instead, and inductor uses them if this option is off.
        "layout_optimization": False,
        "post_grad_custom_pre_pass": _LAYOUTS,
    }
