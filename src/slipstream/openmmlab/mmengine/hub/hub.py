"""Configurations and models from installed libraries."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from slipstream.config.load import library_folder
from slipstream.errors import ConfigError
from slipstream.openmmlab.mmengine.config import Config
from slipstream.openmmlab.mmengine.config.metafile import iter_models, split_config_name
from slipstream.openmmlab.mmengine.registry import MODELS, DefaultScope
from slipstream.openmmlab.mmengine.runner.checkpoint import load_checkpoint

__all__ = ["get_config", "get_model"]


def get_config(cfg_path: str, pretrained: bool = False) -> Any:
    """Return a configuration from an installed library.

    Args:
        cfg_path: the library and the file, as in `mmdet::retinanet/retinanet_r18_fpn_1x_coco.py`.
        pretrained: set `model_path` to the URL of the trained weights.

    Raises:
        ConfigError: if the library is not installed, the configuration does not exist, or its weights are unknown.
    """
    library, name = split_config_name(cfg_path)
    folder = library_folder(library, cfg_path) / ".mim"
    file = folder / "configs" / name
    if not file.is_file():
        raise ConfigError(f"{library} has no configuration '{name}'; see the files in {folder / 'configs'}")
    cfg = Config.fromfile(file)
    if pretrained:
        cfg.model_path = _weights(folder, name)
    return cfg


def _weights(folder: Any, name: str) -> str:
    for model in iter_models(folder):
        if str(model.get("Config", "")).partition("/")[2] == name and "Weights" in model:
            weights = model["Weights"]
            return str(weights[0] if isinstance(weights, list) else weights)
    raise ConfigError(f"the metafiles in {folder} contain no weights for '{name}'; use pretrained=False")


def get_model(cfg_path: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Return a model from an installed library.

    Args:
        cfg_path: see `get_config`.
        pretrained: download and load the trained weights.
        **kwargs: default arguments for the model.

    Raises:
        ConfigError: see `get_config`.
    """
    library = split_config_name(cfg_path)[0]
    with DefaultScope.overwrite_default_scope(library):
        cfg = get_config(cfg_path, pretrained)
        if "data_preprocessor" in cfg:
            cfg.model.data_preprocessor = cfg.data_preprocessor
        importlib.import_module(f"{library}.utils").register_all_modules()
        model: nn.Module = MODELS.build(cfg.model, default_args=kwargs)
        if pretrained:
            load_checkpoint(model, cfg.model_path)
            model._is_init = True  # type: ignore[assignment]  # `init_weights` keeps the loaded weights
        return model
