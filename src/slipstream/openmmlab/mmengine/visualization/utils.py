"""Conversion functions for drawing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["color_str2rgb", "color_val_matplotlib", "img_from_canvas", "tensor2ndarray"]


def tensor2ndarray(value: Any) -> npt.NDArray[Any]:
    """Return a tensor or array as a NumPy array."""
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def color_val_matplotlib(colors: Any) -> Any:
    """Convert colors for matplotlib: tuples of values from 0 to 255 become fractions, and names remain unchanged."""
    if isinstance(colors, list):
        return [color_val_matplotlib(color) for color in colors]
    if isinstance(colors, str):
        return colors
    if not isinstance(colors, tuple):
        raise TypeError(f"a color must be a name or a tuple, not {type(colors)}")
    assert len(colors) == 3, f"a color must have 3 channels, not {len(colors)}"
    assert all(0 <= channel <= 255 for channel in colors), (
        f"the channels of a color must be between 0 and 255, not {colors}"
    )
    return tuple(channel / 255 for channel in colors)


def color_str2rgb(color: str) -> tuple[int, ...]:
    """Return the RGB values (0 to 255) of a named matplotlib color."""
    from matplotlib.colors import to_rgb

    return tuple(int(channel * 255) for channel in to_rgb(color))


def img_from_canvas(canvas: Any) -> npt.NDArray[np.uint8]:
    """Return the RGB image that is drawn on a matplotlib canvas."""
    buffer, (width, height) = canvas.print_to_buffer()
    image = np.frombuffer(buffer, dtype=np.uint8).reshape(height, width, 4)
    return image[..., :3].copy()
