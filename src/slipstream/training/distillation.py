"""A model for the Runner that trains a student network with the outputs of a frozen teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, ModelError
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.model.weight_init import load_pretrained, needs_pretrained
from slipstream.registry import HOOKS, MODELS
from slipstream.training.kd_module import KDModule
from slipstream.training.network import CLASS_LOSSES, ModuleOrConfig, SupervisedModel
from slipstream.zoo import models
from slipstream.zoo.distillation import KDOutput

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["DistillationModel", "TeacherHook"]


class _Teacher:
    """Stores the teacher without registering it as a submodule.

    When a model that contains this object is deep-copied, the copy shares the teacher. When the copy is converted, for
    example to another dtype, it gets its own teacher.

    Args:
        network: the teacher without its input adapter.
        pretrained: arguments of `zoo.models.load`, or None.
        adapter: the input adapter, or None.
    """

    def __init__(
        self, network: nn.Module, pretrained: Mapping[str, Any] | None, adapter: nn.Module | None
    ) -> None:
        self._network, self._pretrained = network, dict(pretrained or {})
        module = network if adapter is None else nn.Sequential(adapter, network)
        self.module = module.eval().requires_grad_(False)
        self._pending = bool(pretrained) or needs_pretrained(network)
        self._owner: _Teacher | None = None
        """The object whose module this object shares; None if the module is not shared."""

    @property
    def pending(self) -> bool:
        """Whether `load` must still load the weights."""
        return self._pending if self._owner is None else self._owner.pending

    def load(self) -> None:
        """Load the weights. Later calls have no effect."""
        if self._owner is not None:
            self._owner.load()
        elif self._pending:
            load_pretrained(self._network)
            if self._pretrained:
                models.load(self._network, **self._pretrained)
            self._pending = False

    def __deepcopy__(self, memo: Any) -> _Teacher:
        shared = copy.copy(self)
        shared._owner = self._owner or self
        return shared

    def convert(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Apply a conversion to the module, or to a copy of it if the module belongs to another object.

        A shared module whose weights have not been loaded is not converted, because the copy would have random weights.
        """
        if self._owner is not None:
            if self.pending or not _would_change(self.module, fn):
                return
            self.module = copy.deepcopy(self.module)
            self._owner, self._pending = None, False
        self.module._apply(fn, recurse)


def _would_change(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a conversion, such as a move to another device, returns new tensors."""
    with torch.no_grad():
        return any(fn(tensor) is not tensor for tensor in chain(module.parameters(), module.buffers()))


@MODELS.register_module()
class DistillationModel(SupervisedModel):
    """A `SupervisedModel` whose loss also receives the output of a teacher.

    The teacher is not a submodule, so it is not trained, averaged, synchronized or saved. It always runs in evaluation
    mode and without gradients, and it follows the model to other devices and dtypes. Predictions are those of the
    student.

    Args:
        network: the student.
        teacher: the teacher, a module or its configuration.
        teacher_pretrained: arguments that `load_teacher` passes to `zoo.models.load` to load the teacher's weights.
        teacher_input_adapter: module that is applied to the teacher's images, such as `NormalizationAdapter`, or its
            configuration.
        kd_module: a `KDModule` that contains `network` and `teacher`; its forward method returns the outputs for the
            loss. If None, the loss receives the outputs of both networks.
        loss: called as `loss(KDOutput(student_output, teacher_output), targets)`.
        arguments: see `SupervisedModel`.

    Raises:
        ConfigError: if the loss does not use the teacher.
        ModelError: when the loss is computed, if the teacher's weights have not been loaded.
    """

    _kd_module: KDModule | None

    def __init__(
        self,
        network: ModuleOrConfig,
        teacher: ModuleOrConfig,
        loss: Any,
        teacher_pretrained: Mapping[str, Any] | None = None,
        teacher_input_adapter: ModuleOrConfig | None = None,
        kd_module: KDModule | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(network, loss, **arguments)
        if isinstance(self.loss, CLASS_LOSSES):
            raise ConfigError(
                f"{type(self.loss).__name__} does not use the teacher; use KDLogitsLoss or SegKDLoss",
                "training_params.loss",
            )
        built: nn.Module = MODELS.build(teacher) if isinstance(teacher, Mapping) else teacher
        adapter = teacher_input_adapter
        adapter = MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
        self._teacher = _Teacher(built, teacher_pretrained, adapter)
        # Not a submodule, because checkpoints contain only the student.
        self.__dict__["_kd_module"] = kd_module

    @property
    def teacher(self) -> nn.Module:
        """The teacher, including its input adapter."""
        return self._teacher.module

    def init_weights(self) -> None:
        """Initialize the student, and load the weights of both networks. Later calls have no effect."""
        super().init_weights()
        self.load_teacher()

    def load_teacher(self) -> None:
        """Load the teacher's weights, which checkpoints do not contain. Later calls have no effect.

        Raises:
            CheckpointError: if the weights cannot be read.
        """
        self._teacher.load()

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, *others: Any, mode: str = "tensor"
    ) -> Any:
        """Return the losses, the student's predictions or its output; see `SupervisedModel.forward`."""
        if self._kd_module is None or mode != "loss":
            return super().forward(inputs, targets, *others, mode=mode)
        inputs = inputs.float() if inputs.dtype == torch.uint8 else inputs
        kd_output = self.loss_inputs(None, inputs, targets)
        if self.training and targets is not None:
            self._count(kd_output.student_output, inputs, targets)
        return self.losses(kd_output, targets)

    def loss_inputs(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> KDOutput:
        """Return the outputs of both networks."""
        if self._teacher.pending:
            raise ModelError(
                "the teacher's weights have not been loaded; call init_weights() or load_teacher()"
            )
        if self._kd_module is not None:
            output: KDOutput = self._kd_module(inputs)
            return output  # unchanged, because a subclass may return tensors other than class scores
        with torch.no_grad():
            teacher_output = self._teacher.module(inputs)
        student, teacher = (
            super(DistillationModel, self).loss_inputs(output, inputs, targets)
            for output in (outputs, teacher_output)
        )
        return KDOutput(student, teacher)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the student and the `kd_module`."""
        super().train(mode)
        if self._kd_module is not None:
            self._kd_module.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion, such as a move to another device, to the teacher as well."""
        self._teacher.convert(fn, recurse)
        if self._kd_module is not None:
            self._kd_module.teacher = self.teacher  # converting a deep copy of the model replaces its teacher
        super()._apply(fn, recurse)
        return self


@HOOKS.register_module()
class TeacherHook(Hook):
    """Load the teacher's weights before each run. Validation also needs them, because some losses use the teacher."""

    def before_run(self, runner: Runner) -> None:
        """Load the weights; see `DistillationModel.load_teacher`."""
        model = unwrap_model(runner.model)
        if not isinstance(model, DistillationModel):
            raise ModelError(f"TeacherHook requires a DistillationModel, not {type(model).__name__}")
        model.load_teacher()
