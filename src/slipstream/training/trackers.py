"""SuperGradients' `sg_logger` as the Runner's visualizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.training.params import TrainingParams
from slipstream.visualization import default_backends

__all__ = ["visualizer"]

_WANDB = {"project_name": "project", "entity": "entity", "wandb_id": "id"}
"""Words of `wandb.init` for those of `sg_logger_params`."""
_UNNEEDED = ("project_name", "monitor_system", "model_name")
_REFUSED = {
    "save_checkpoints_remote": "checkpoints stay in the run's folder: copy them from there",
    "save_tensorboard_remote": "TensorBoard's files stay in the run's folder: copy them from there",
    "save_logs_remote": "logs stay in the run's folder: copy them from there",
    "launch_tensorboard": "no TensorBoard is started: run `tensorboard --logdir` on the run's folder",
    "tensorboard_port": "no TensorBoard is started: run `tensorboard --logdir` on the run's folder",
    "tb_files_user_prompt": "nothing is asked while it runs",
    "save_code": "code is not uploaded",
    "api_server": "set the environment variable WANDB_BASE_URL",
}


def visualizer(params: TrainingParams, experiment_name: str) -> dict[str, Any]:
    """Return the configuration of the visualizer: files, TensorBoard, and the tracker that `sg_logger` names.

    Raises:
        UnknownNameError: no such logger, or no such key in `sg_logger_params`.
        ConfigError: a key that asks for what does not happen.
    """
    backends: list[Any] = [*default_backends()]
    if not isinstance(params.sg_logger, str):
        backends.append(params.sg_logger)  # a backend, or its configuration
    elif params.sg_logger == "wandb_sg_logger":
        backends.append(_wandb(params.sg_logger_params, experiment_name))
    elif params.sg_logger != "base_sg_logger":
        known = ("base_sg_logger", "wandb_sg_logger")
        raise UnknownNameError(
            f"there is no logger '{params.sg_logger}'{did_you_mean(params.sg_logger, known)}; "
            f"there are {' and '.join(known)}, and any visualization backend ({{'type': 'MLflowVisBackend'}})",
            "training_params.sg_logger",
        )
    _check(params.sg_logger_params)
    return {"type": "Visualizer", "vis_backends": backends}


def _wandb(given: Mapping[str, Any], experiment_name: str) -> dict[str, Any]:
    words = {_WANDB[key]: value for key, value in given.items() if key in _WANDB and value}
    return {"type": "WandbVisBackend", "init_kwargs": {"name": experiment_name, **words}}


def _check(given: Mapping[str, Any]) -> None:
    known = [*_WANDB, *_UNNEEDED, *_REFUSED]
    for key, value in given.items():
        place = f"training_params.sg_logger_params.{key}"
        if key not in known:
            raise UnknownNameError(f"there is no such key{did_you_mean(key, known)}", place)
        if key in _REFUSED and value:
            raise ConfigError(_REFUSED[key], place)
