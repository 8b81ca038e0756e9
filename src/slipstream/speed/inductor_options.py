"""Inductor's options for the step as one graph, by device."""

from __future__ import annotations

from typing import Any

from slipstream.speed.conv_layout import LayOutConvolutions

__all__ = ["inductor_options"]


def inductor_options(device_type: str) -> dict[str, Any]:
    """Return inductor's options for a step on this device, as `torch.compile(options=...)` takes them."""
    if device_type == "cpu":
        return {
            # The pass below decides the layout of each convolution by its strides; inductor heeds them without this.
            "layout_optimization": False,
            "post_grad_custom_pre_pass": LayOutConvolutions(),
        }
    return {}
