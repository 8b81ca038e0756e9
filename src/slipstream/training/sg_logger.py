"""SuperGradients' `context.sg_logger`, which passes values and images to the Runner's visualizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from slipstream.errors import DataError, SlipstreamError

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["SGLogger"]


class MissingLoggerMethodError(SlipstreamError, AttributeError):
    """The logger does not have this method."""


class SGLogger:
    """SuperGradients' logger. By default, values are recorded for the current epoch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingLoggerMethodError(
            f"context.sg_logger.{name} is not supported; use context.runner.visualizer, or write a file to "
            "context.ckpt_dir"
        )

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> None:
        """Record a scalar."""
        self._runner.visualizer.add_scalar(tag, _number(scalar_value), self._step(global_step))

    def add_scalars(self, tag_scalar_dict: Mapping[str, Any], global_step: int | None = None) -> None:
        """Record several scalars."""
        values = {tag: _number(value) for tag, value in tag_scalar_dict.items()}
        self._runner.visualizer.add_scalars(values, self._step(global_step))

    def add_image(
        self, tag: str, image: Any, data_format: str = "CHW", global_step: int | None = None
    ) -> None:
        """Record an RGB image.

        Args:
            tag: name of the image.
            image: a tensor, an array, or a Pillow image (H, W, 3). Values are uint8, or floats from 0 to 1.
            data_format: order of the dimensions: `CHW` or `HWC`.
            global_step: step at which to record the image. Default: the current epoch.

        Raises:
            DataError: if `data_format` is unknown, or the image does not have three dimensions.
        """
        pixels = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
        if data_format not in ("CHW", "HWC") or pixels.ndim != 3:
            raise DataError(
                f"context.sg_logger.add_image requires a 3-dimensional image in CHW or HWC format, not an image "
                f"of shape {pixels.shape} in {data_format!r} format"
            )
        if data_format == "CHW" and pixels.shape[-1] != 3:
            pixels = pixels.transpose(1, 2, 0)
        if pixels.dtype != np.uint8:
            pixels = (pixels.astype(np.float64) * 255).round().clip(0, 255).astype(np.uint8)
        self._runner.visualizer.add_image(tag, np.ascontiguousarray(pixels), self._step(global_step))

    def add_images(
        self, tag: str, images: Any, data_format: str = "NCHW", global_step: int | None = None
    ) -> None:
        """Record several images as `tag/0`, `tag/1` and so on; see `add_image`."""
        for index, image in enumerate(images):
            self.add_image(f"{tag}/{index}", image, data_format.removeprefix("N"), global_step)

    def add_config(self, tag: str, config: Mapping[str, Any]) -> None:
        """Record a configuration."""
        self._runner.visualizer.add_config({tag: dict(config)})

    def flush(self) -> None:
        """Write the recorded values to disk."""
        self._runner.visualizer.flush()

    def local_dir(self) -> str:
        """Return the run's folder."""
        return self._runner.work_dir

    def _step(self, step: int | None) -> int:
        return self._runner.epoch if step is None else int(step)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic) else value
