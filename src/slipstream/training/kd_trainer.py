"""SuperGradients' `KDTrainer`: knowledge distillation with the Runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.training.kd_recipe import check_mode, input_adapter
from slipstream.training.trainer import Trainer

__all__ = ["KDTrainer"]


class KDTrainer(Trainer):
    """Train a student network with the outputs of a frozen teacher; see `Trainer` and `DistillationModel`.

    `net` and the checkpoints contain only the student.
    """

    def train(  # type: ignore[override]  # SuperGradients' order of arguments
        self,
        model: nn.Module | None = None,
        training_params: Mapping[str, Any] | None = None,
        student: nn.Module | None = None,
        teacher: nn.Module | None = None,
        kd_architecture: str = "kd_module",
        kd_arch_params: Mapping[str, Any] | None = None,
        run_teacher_on_eval: bool = True,
        train_loader: Any = None,
        valid_loader: Any = None,
        test_loaders: Mapping[str, Any] | None = None,
        additional_configs_to_log: Mapping[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        """Train `student` in place, and return the metrics of each validation run; see `Trainer.train`.

        Args:
            model: must be None.
            training_params: keys of `TrainingParams`. The loss receives a `KDOutput`.
            student, teacher: modules. The teacher is frozen in place.
            kd_architecture: must be 'kd_module'.
            kd_arch_params: `teacher_input_adapter`, a module for the teacher's images.
            run_teacher_on_eval: must be True.
            train_loader, valid_loader, test_loaders, additional_configs_to_log: see `Trainer.train`.

        Raises:
            UnknownNameError, ConfigError: if a key or value is invalid or not supported.
        """
        if model is not None or kd_architecture != "kd_module":
            raise ConfigError(
                "modules that contain both networks are not supported; pass student=... and teacher=.... To use other "
                "outputs of the networks, override loss_inputs of slipstream.training.distillation.DistillationModel",
                "model" if model is not None else "kd_architecture",
            )
        if student is None or teacher is None:
            raise ConfigError(
                "is required; pass a torch.nn.Module", "student" if student is None else "teacher"
            )
        check_mode(run_teacher_on_eval)
        return self._train_network(
            student,
            training_params,
            train_loader,
            valid_loader,
            test_loaders,
            additional_configs_to_log,
            teacher={"teacher": teacher, **input_adapter(kd_arch_params, "kd_arch_params")},
        )
