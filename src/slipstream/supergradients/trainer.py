"""`Trainer` and `KDTrainer` with SuperGradients' constructor arguments and method names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.supergradients.environment import setup_device
from slipstream.training.kd_trainer import KDTrainer as SlipstreamKDTrainer
from slipstream.training.trainer import Trainer as SlipstreamTrainer

__all__ = ["KDTrainer", "Trainer"]


class Trainer(SlipstreamTrainer):
    """`slipstream.Trainer` with SuperGradients' constructor arguments and method names.

    Args:
        experiment_name: name of the run and of its folder.
        device, multi_gpu: see `setup_device`.
        ckpt_root_dir: parent folder of the run's folder. Default: `work_dirs`.

    Raises:
        ConfigError: see `setup_device`.
    """

    def __init__(
        self,
        experiment_name: str,
        device: str | None = None,
        multi_gpu: Any = None,
        ckpt_root_dir: str | Path | None = None,
    ) -> None:
        if device is not None or multi_gpu is not None:
            setup_device(multi_gpu, device=device)
        super().__init__(experiment_name, ckpt_root_dir)

    @classmethod
    def evaluate_from_config(cls, cfg: Any) -> tuple[nn.Module, dict[str, float]]:
        """Validate the network of a composed recipe; see `evaluate_from_recipe`."""
        return cls.evaluate_from_recipe(cfg)

    @classmethod
    def resume_experiment(  # type: ignore[override]  # SuperGradients' arguments
        cls, experiment_name: str, ckpt_root_dir: str | Path | None = None, run_id: str | None = None
    ) -> tuple[nn.Module, list[dict[str, float]]]:
        """Resume an experiment from its latest checkpoint; see `slipstream.Trainer.resume_experiment`.

        Raises:
            ConfigError: if `run_id` is set.
        """
        if run_id is not None:
            raise ConfigError("must be None, because an experiment has a single folder", "run_id")
        return super().resume_experiment(experiment_name, ckpt_root_dir)


class KDTrainer(Trainer, SlipstreamKDTrainer):
    """`slipstream.training.KDTrainer` with SuperGradients' constructor arguments and method names."""
