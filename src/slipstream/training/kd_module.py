"""SuperGradients' `KDModule`: a student and a teacher whose outputs are passed to a distillation loss."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.registry import MODELS
from slipstream.training.kd_recipe import check_mode, input_adapter
from slipstream.zoo.distillation import KDOutput

__all__ = ["KDModule"]


class KDModule(nn.Module):
    """A student and a teacher for `KDTrainer.train(model=...)`.

    A subclass may override `forward` to return other outputs of the networks, which are passed to the loss unchanged.
    It must not have parameters of its own. Only the student is trained, validated and saved; the teacher always runs in
    evaluation mode. A deep copy shares the teacher with the original.

    Args:
        arch_params: a dict with the optional key `teacher_input_adapter`: a module that is applied to the teacher's
            images, or the configuration of the module.
        student, teacher: modules. The parameters of the teacher are frozen in place.
        run_teacher_on_eval: must be True.

    Raises:
        UnknownNameError, ConfigError: if an argument is missing, invalid or not supported.
    """

    def __init__(
        self,
        arch_params: Mapping[str, Any] | None = None,
        student: nn.Module | None = None,
        teacher: nn.Module | None = None,
        run_teacher_on_eval: bool = True,
    ) -> None:
        super().__init__()
        if student is None or teacher is None:
            raise ConfigError(
                "is required; pass a torch.nn.Module", "student" if student is None else "teacher"
            )
        check_mode(run_teacher_on_eval)
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        adapter: Any = input_adapter(arch_params, "arch_params").get("teacher_input_adapter")
        self.teacher_input_adapter: nn.Module | None = (
            MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
        )

    @property
    def is_customized(self) -> bool:
        """Whether a subclass overrides `forward`."""
        return type(self).forward is not KDModule.forward

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> KDOutput:
        """Return the outputs of both networks for images (N, C, H, W)."""
        adapter = self.teacher_input_adapter
        return KDOutput(self.student(x), self.teacher(x if adapter is None else adapter(x)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)], memo[id(self.teacher)] = copied, self.teacher
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
