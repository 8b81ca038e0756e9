"""MMEngine's `BaseInferencer`, which executes no code from a checkpoint."""

from __future__ import annotations

from typing import Any

from mmengine.infer import _original_infer as original
from mmengine.infer._original_infer import (
    ConfigType,
    ImgType,
    InferencerMeta,
    InputsType,
    InputType,
    InstanceList,
    ModelType,
    ResType,
)
from mmengine.runner.checkpoint import _load_checkpoint

from slipstream.openmmlab.config import saved_config

__all__ = [
    "BaseInferencer", "ConfigType", "ImgType", "InferencerMeta", "InputType", "InputsType", "InstanceList",
    "ModelType", "ResType",
]  # fmt: skip


class BaseInferencer(original.BaseInferencer):
    """See MMEngine's `BaseInferencer`.

    If the configuration is read from the checkpoint, it may contain only built-in values.
    """

    def _init_model(self, cfg: Any, weights: str | None, device: str = "cpu") -> Any:
        if not cfg and weights is not None:
            cfg.update(saved_config(_load_checkpoint(weights, map_location="cpu")))
        return super()._init_model(cfg, weights, device)
