"""Translate SuperGradients' `sg_logger` into a configuration for the Runner's visualizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.training.params import TrainingParams
from slipstream.visualization import default_backends

__all__ = ["visualizer"]

_WANDB = {"project_name": "project", "entity": "entity", "wandb_id": "id"}
"""Keys of `sg_logger_params`, with the corresponding arguments of `wandb.init`."""
_IGNORED = ("project_name", "monitor_system", "model_name")
_TENSORBOARD = ("launch_tensorboard", "tensorboard_port")
"""Keys that have no effect; setting one of them logs a warning."""
_UNSUPPORTED = {
    "save_checkpoints_remote": "checkpoints are saved only in the run's folder; copy them from there",
    "save_tensorboard_remote": "TensorBoard files are saved only in the run's folder; copy them from there",
    "save_logs_remote": "logs are saved only in the run's folder; copy them from there",
    "tb_files_user_prompt": "training is not interactive",
    "save_code": "uploading code is not supported",
    "api_server": "set the WANDB_BASE_URL environment variable instead",
}


def visualizer(params: TrainingParams, experiment_name: str) -> dict[str, Any]:
    """Return the configuration of a visualizer with the default backends and the tracker that `sg_logger` selects.

    Raises:
        UnknownNameError: if the logger or a key of `sg_logger_params` is unknown.
        ConfigError: if a key is not supported.
    """
    backends: list[Any] = [*default_backends()]
    if not isinstance(params.sg_logger, str):
        backends.append(params.sg_logger)  # `sg_logger` is a backend or its configuration
    elif params.sg_logger == "wandb_sg_logger":
        backends.append(_wandb(params.sg_logger_params, experiment_name))
    elif params.sg_logger != "base_sg_logger":
        known = ("base_sg_logger", "wandb_sg_logger")
        raise UnknownNameError(
            f"no logger is named '{params.sg_logger}'{did_you_mean(params.sg_logger, known)}; "
            f"use {' or '.join(known)}, or a visualization backend, such as {{'type': 'MLflowVisBackend'}}",
            "training_params.sg_logger",
        )
    _check(params.sg_logger_params)
    return {"type": "Visualizer", "vis_backends": backends}


def _wandb(options: Mapping[str, Any], experiment_name: str) -> dict[str, Any]:
    renamed = {_WANDB[key]: value for key, value in options.items() if key in _WANDB and value}
    return {"type": "WandbVisBackend", "init_kwargs": {"name": experiment_name, **renamed}}


def _check(options: Mapping[str, Any]) -> None:
    known = [*_WANDB, *_IGNORED, *_TENSORBOARD, *_UNSUPPORTED]
    for key, value in options.items():
        config_path = f"training_params.sg_logger_params.{key}"
        if key not in known:
            raise UnknownNameError(f"unknown key{did_you_mean(key, known)}", config_path)
        if key in _UNSUPPORTED and value:
            raise ConfigError(_UNSUPPORTED[key], config_path)
        if key in _TENSORBOARD and value:
            logging.getLogger("slipstream").warning(
                f"{config_path} has no effect, because TensorBoard is not started automatically; run `tensorboard "
                "--logdir` on the run's folder"
            )
