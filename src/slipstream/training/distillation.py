"""Knowledge distillation: a student that is trained with the outputs of a frozen teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, ModelError, UnknownNameError
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.model.weight_init import load_pretrained, needs_pretrained
from slipstream.registry import HOOKS, MODELS
from slipstream.training.network import CLASS_LOSSES, ModuleOrConfig, SupervisedModel
from slipstream.training.params import configuration
from slipstream.zoo import models
from slipstream.zoo.distillation import KDOutput

if TYPE_CHECKING:
    from slipstream.runner import Runner


class KDModule(nn.Module):
    """A student and a teacher for `KDTrainer.train(model=...)`.

    Only the student is trained, validated and saved; the teacher always runs in evaluation mode. A subclass may set the
    student, the teacher and the adapter, but `DistillationModel` does not call its `forward` method.

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
            raise ConfigError("student and teacher are required; pass two modules")
        check_mode(run_teacher_on_eval)
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        adapter: Any = input_adapter(arch_params, "arch_params").get("teacher_input_adapter")
        built: nn.Module | None = MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
        self.teacher_input_adapter = built

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> KDOutput:
        """Return the outputs of both networks for images (N, C, H, W)."""
        adapter = self.teacher_input_adapter
        return KDOutput(self.student(x), self.teacher(x if adapter is None else adapter(x)))


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
        # The object whose module this object shares; None if the module is not shared.
        self._owner: _Teacher | None = None

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

    @torch.no_grad()
    def convert(self, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
        """Apply a conversion to the module, or to a copy of it if the module belongs to another object.

        A shared module whose weights have not been loaded is not converted, because the copy would have random weights.
        """
        if self._owner is not None:
            tensors = chain(self.module.parameters(), self.module.buffers())
            if self.pending or all(fn(tensor) is tensor for tensor in tensors):
                return
            self.module = copy.deepcopy(self.module)
            self._owner, self._pending = None, False
        self.module._apply(fn, recurse)


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
        loss: called as `loss(KDOutput(student_output, teacher_output), targets)`.
        arguments: see `SupervisedModel`.

    Raises:
        ConfigError: if the loss does not use the teacher.
        ModelError: when the loss is computed, if the teacher's weights have not been loaded.
    """

    def __init__(
        self,
        network: ModuleOrConfig,
        teacher: ModuleOrConfig,
        loss: Any,
        teacher_pretrained: Mapping[str, Any] | None = None,
        teacher_input_adapter: ModuleOrConfig | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(network, loss, **arguments)
        if isinstance(self.loss, CLASS_LOSSES):
            raise ConfigError("does not use the teacher; use KDLogitsLoss", "training_params.loss")
        built: nn.Module = MODELS.build(teacher) if isinstance(teacher, Mapping) else teacher
        adapter = teacher_input_adapter
        adapter = MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
        self._teacher = _Teacher(built, teacher_pretrained, adapter)

    @property
    def teacher(self) -> nn.Module:
        """The teacher, including its input adapter."""
        return self._teacher.module

    def init_weights(self) -> None:
        """Initialize the student, and load the weights of both networks. Later calls have no effect."""
        super().init_weights()
        self.load_teacher()

    def load_teacher(self) -> None:
        """Load the teacher's weights, which checkpoints do not contain. Later calls have no effect."""
        self._teacher.load()

    def loss_inputs(self, outputs: Any, inputs: Tensor, targets: Tensor | None) -> KDOutput:
        """Return the outputs of both networks."""
        if self._teacher.pending:
            raise ModelError("the teacher's weights have not been loaded; call load_teacher()")
        with torch.no_grad():
            teacher_output = self._teacher.module(inputs)
        prepare = super().loss_inputs
        return KDOutput(*(prepare(output, inputs, targets) for output in (outputs, teacher_output)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a conversion, such as a move to another device, to the teacher as well."""
        self._teacher.convert(fn, recurse)
        super()._apply(fn, recurse)
        return self


@HOOKS.register_module()
class TeacherHook(Hook):
    """Load the teacher's weights before each run. Validation also needs them, because some losses use the teacher."""

    def before_run(self, runner: Runner) -> None:
        """Load the weights; see `DistillationModel.load_teacher`."""
        model: Any = unwrap_model(runner.model)
        model.load_teacher()


def input_adapter(options: Mapping[str, Any] | None, config_path: str) -> dict[str, Any]:
    """Return the adapter for the teacher's images, from SuperGradients' `kd_module` arguments.

    Raises:
        UnknownNameError: if an argument does not exist.
        ConfigError: if an adapter for the student is set.
    """
    kept = {key: v for key, v in (options or {}).items() if v is not None and key != "num_classes"}
    for key in kept:  # a student_input_adapter is not supported; use the dataset's transforms
        if key != "teacher_input_adapter":
            raise UnknownNameError("unknown key; use teacher_input_adapter", f"{config_path}.{key}")
    return {key: configuration(value, f"{config_path}.{key}") for key, value in kept.items()}


def check_mode(run_teacher_on_eval: Any) -> None:
    """Raise a ConfigError unless the teacher runs in evaluation mode."""
    if run_teacher_on_eval not in (True, None):
        raise ConfigError("must be True, because the teacher must not change", "run_teacher_on_eval")
