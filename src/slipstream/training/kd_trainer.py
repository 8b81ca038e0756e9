"""SuperGradients' `KDTrainer`: knowledge distillation with the Runner."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

from slipstream.errors import ConfigError
from slipstream.training.kd_module import KDModule
from slipstream.training.kd_recipe import input_adapter
from slipstream.training.trainer import Trainer

__all__ = ["KDTrainer"]


class KDTrainer(Trainer):
    """Train a student network with the outputs of a frozen teacher; see `Trainer` and `DistillationModel`.

    `net` and the checkpoints contain only the student.
    """

    def train(  # type: ignore[override]  # SuperGradients' argument order
        self,
        model: nn.Module | None = None,
        training_params: Mapping[str, Any] | None = None,
        student: nn.Module | None = None,
        teacher: nn.Module | None = None,
        kd_architecture: str | type[KDModule] = "kd_module",
        kd_arch_params: Mapping[str, Any] | None = None,
        run_teacher_on_eval: bool = True,
        train_loader: Any = None,
        valid_loader: Any = None,
        test_loaders: Mapping[str, Any] | None = None,
        additional_configs_to_log: Mapping[str, Any] | None = None,
    ) -> list[dict[str, float]]:
        """Train `student` in place, and return the metrics of each validation run; see `Trainer.train`.

        Args:
            model: a `KDModule`. If it is set, the arguments from `student` to `run_teacher_on_eval` are ignored.
            training_params: keys of `TrainingParams`. The loss receives a `KDOutput`.
            student, teacher: modules. The teacher is frozen in place.
            kd_architecture: 'kd_module', or a subclass of `KDModule`.
            kd_arch_params: a dict with the optional key `teacher_input_adapter`; see `KDModule`.
            run_teacher_on_eval: must be True.
            train_loader, valid_loader, test_loaders, additional_configs_to_log: see `Trainer.train`.

        Raises:
            UnknownNameError, ConfigError: if a key or value is invalid or not supported.
        """
        if model is None:
            options = input_adapter(kd_arch_params, "kd_arch_params")
            module = _kd_class(kd_architecture)(options, student, teacher, run_teacher_on_eval)
        elif isinstance(model, KDModule):
            module = model
        else:
            raise ConfigError(
                f"must be a KDModule, not {type(model).__name__}; alternatively, pass student=... and teacher=...",
                "model",
            )
        return self._train_network(
            module.student,
            training_params,
            train_loader,
            valid_loader,
            test_loaders,
            additional_configs_to_log,
            teacher=_teacher_arguments(module),
        )


def _kd_class(architecture: Any) -> type[KDModule]:
    if architecture == "kd_module":
        return KDModule
    if isinstance(architecture, type) and issubclass(architecture, KDModule):
        return architecture
    raise ConfigError(
        f"must be 'kd_module' or a subclass of KDModule, not {architecture!r}", "kd_architecture"
    )


def _teacher_arguments(module: KDModule) -> dict[str, Any]:
    """Return the arguments of `DistillationModel` that describe the teacher."""
    adapter = module.teacher_input_adapter
    if not module.is_customized:
        return {"teacher": module.teacher, "teacher_input_adapter": adapter}
    if adapter is not None:
        raise ConfigError(
            f"is not supported, because {type(module).__name__} overrides forward; set teacher to "
            "nn.Sequential(adapter, teacher)",
            "arch_params.teacher_input_adapter",
        )
    networks = (module.student, module.teacher)
    known = {id(tensor) for network in networks for tensor in chain(network.parameters(), network.buffers())}
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if id(tensor) not in known:
            raise ConfigError(
                f"{type(module).__name__} contains '{name}' outside of the student and the teacher, so it would be "
                "neither trained nor saved; move it into the student",
                "kd_architecture",
            )
    return {"teacher": module.teacher, "kd_module": module}
