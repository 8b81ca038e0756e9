"""MMEngine's `Visualizer`, with Slipstream's backends."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from mmengine.visualization import _original_visualizer as original

from slipstream.openmmlab.registry import VISUALIZERS
from slipstream.visualization import (
    BaseVisBackend,
    LocalVisBackend,
    MLflowVisBackend,
    TensorboardVisBackend,
    WandbVisBackend,
)
from slipstream.visualization import Visualizer as OwnVisualizer

__all__ = [
    "BaseVisBackend", "LocalVisBackend", "MLflowVisBackend", "TensorboardVisBackend", "Visualizer",
    "WandbVisBackend",
]  # fmt: skip


@VISUALIZERS.register_module(force=True)
class Visualizer(OwnVisualizer, original.Visualizer):
    """Draw on an image as MMEngine does, and pass scalars, images and the configuration to Slipstream's backends.

    The most recently created visualizer, which may be an instance of a subclass, is the current instance.

    Args:
        name: name of the instance.
        image: an RGB image, uint8 (H, W, 3).
        vis_backends: the backends or their configurations.
        save_dir: parent folder of the backends' files; if it is not set, backend configurations without their own
            `save_dir` are omitted.
        **figure: options for matplotlib's figures; see MMEngine's `Visualizer`.
    """

    def __init__(
        self,
        name: str = "visualizer",
        image: Any = None,
        vis_backends: Any = None,
        save_dir: str | None = None,
        **figure: Any,
    ) -> None:
        original.Visualizer.__init__(self, name, image, **figure)
        OwnVisualizer.__init__(self, name, _usable_backends(vis_backends, save_dir), save_dir)
        self._vis_backends = self._backends
        # Add the instance to both dicts, so that `Visualizer.get_current_instance` can return instances of subclasses.
        for instances in (type(self)._instance_dict, Visualizer._instance_dict):
            instances.pop(name, None)
            instances[name] = self


def _usable_backends(backends: Any, save_dir: str | None) -> list[Any]:
    """Return the backends. If `save_dir` is None, omit configurations without a `save_dir`, and issue a warning."""
    specs = list(backends) if isinstance(backends, list | tuple) else [backends]
    if save_dir is not None:
        return specs
    usable = [b for b in specs if not isinstance(b, Mapping) or b.get("save_dir") is not None]
    if omitted := [str(b.get("type")) for b in specs if isinstance(b, Mapping) and b not in usable]:
        warnings.warn(
            f"the visualizer has no save_dir, so these backends are not used: {', '.join(omitted)}; set save_dir",
            stacklevel=4,
        )
    return usable
