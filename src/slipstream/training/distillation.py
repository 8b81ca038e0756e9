"""A model for the Runner that trains a student network with the outputs of a frozen teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from slipstream.apps.zoo import models
from slipstream.apps.zoo.distillation import KDOutput
from slipstream.errors import ConfigError
from slipstream.registry import MODELS
from slipstream.training.network import CLASS_LOSSES, Configured, SupervisedModel

__all__ = ["DistillationModel"]


class _Held:
    """Holds a module without registering it as a submodule.

    A deep copy of the owner shares the module, until a conversion of the copy changes it.
    """

    def __init__(self, module: nn.Module, is_shared: bool = False) -> None:
        self.module, self.is_shared = module, is_shared

    def __deepcopy__(self, memo: Any) -> _Held:
        return _Held(self.module, is_shared=True)

    def convert(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Apply a conversion to the module, or to a copy of it if the module belongs to another owner."""
        if self.is_shared:
            with torch.no_grad():
                if all(
                    fn(tensor) is tensor for tensor in chain(self.module.parameters(), self.module.buffers())
                ):
                    return  # a change of the device or dtype to the current one needs no copy
            self.module, self.is_shared = copy.deepcopy(self.module), False
        self.module._apply(fn, recurse)


@MODELS.register_module()
class DistillationModel(SupervisedModel):
    """A `SupervisedModel` whose loss also receives the output of a teacher.

    The teacher is not a submodule: it is not trained, averaged, synchronized or saved. It always runs in evaluation
    mode and without gradients, and moves to the device and dtype of the model. Predictions are those of the student.

    Args:
        network: the student.
        teacher: the teacher, a module or its configuration.
        teacher_pretrained: arguments of `zoo.models.load`, with which the constructor loads the teacher's weights.
        teacher_input_adapter: module for the teacher's images, or its configuration, such as `NormalizationAdapter`.
        loss: `loss(KDOutput(student_output, teacher_output), targets)`.
        arguments: see `SupervisedModel`.

    Raises:
        ConfigError: if the loss does not use the teacher.
        CheckpointError: if the teacher's weights cannot be read.
    """

    def __init__(
        self,
        network: Configured,
        teacher: Configured,
        loss: Any,
        teacher_pretrained: Mapping[str, Any] | None = None,
        teacher_input_adapter: Configured | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(network, loss, **arguments)
        if isinstance(self.loss, CLASS_LOSSES):
            raise ConfigError(
                f"{type(self.loss).__name__} does not use the teacher; use KDLogitsLoss or SegKDLoss",
                "training_params.loss",
            )
        built: nn.Module = MODELS.build(teacher) if isinstance(teacher, Mapping) else teacher
        if teacher_pretrained:
            models.load(built, **teacher_pretrained)
        if teacher_input_adapter is not None:
            adapter = teacher_input_adapter
            adapted = MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
            built = nn.Sequential(adapted, built)
        self._teacher = _Held(built.eval().requires_grad_(False))

    @property
    def teacher(self) -> nn.Module:
        """The teacher, including its input adapter."""
        return self._teacher.module

    def loss_inputs(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> KDOutput:
        """Return the outputs of both networks."""
        with torch.no_grad():
            taught = self._teacher.module(inputs)
        student, teacher = (
            super(DistillationModel, self).loss_inputs(found, inputs, targets) for found in (outputs, taught)
        )
        return KDOutput(student, teacher)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion, such as a change of the device, to the teacher as well."""
        self._teacher.convert(fn, recurse)
        super()._apply(fn, recurse)
        return self
