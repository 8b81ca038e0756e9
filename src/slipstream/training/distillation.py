"""Knowledge distillation: a student that is trained with the outputs of a frozen teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, ModelError, UnknownNameError, did_you_mean
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.model.weight_init import load_pretrained, needs_pretrained
from slipstream.registry import HOOKS, MODELS
from slipstream.training.factories import configuration
from slipstream.training.network import CLASS_LOSSES, ModuleOrConfig, SupervisedModel
from slipstream.zoo import models
from slipstream.zoo.distillation import KDOutput

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["DistillationModel", "KDModule", "TeacherHook", "check_mode", "input_adapter"]

_ADAPTERS = ("teacher_input_adapter", "student_input_adapter")


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
            raise ConfigError("student and teacher are required; pass two modules")
        check_mode(run_teacher_on_eval)
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        adapter: Any = input_adapter(arch_params, "arch_params").get("teacher_input_adapter")
        self.teacher_input_adapter: nn.Module | None = (
            MODELS.build(adapter) if isinstance(adapter, Mapping) else adapter
        )

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> KDOutput:
        """Return the outputs of both networks for images (N, C, H, W)."""
        adapter = self.teacher_input_adapter
        return KDOutput(self.student(x), self.teacher(x if adapter is None else adapter(x)))

    def teacher_arguments(self) -> dict[str, Any]:
        """Return the arguments of `DistillationModel` that describe the teacher.

        Raises:
            ConfigError: if a subclass has an input adapter, or tensors outside the student and the teacher.
        """
        if type(self).forward is KDModule.forward:
            return {"teacher": self.teacher, "teacher_input_adapter": self.teacher_input_adapter}
        if self.teacher_input_adapter is not None:
            raise ConfigError(
                "set teacher to nn.Sequential(adapter, teacher)", "arch_params.teacher_input_adapter"
            )
        networks = (self.student, self.teacher)
        known = {id(tensor) for net in networks for tensor in chain(net.parameters(), net.buffers())}
        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            if id(tensor) not in known:
                raise ConfigError(
                    f"move '{name}' into the student, which alone is trained", "kd_architecture"
                )
        return {"teacher": self.teacher, "kd_module": self}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)], memo[id(self.teacher)] = copied, self.teacher
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


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
                "does not use the teacher; use KDLogitsLoss or SegKDLoss", "training_params.loss"
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
        """Load the teacher's weights, which checkpoints do not contain. Later calls have no effect."""
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
            raise ModelError("the teacher's weights have not been loaded; call load_teacher()")
        if self._kd_module is not None:
            output: KDOutput = self._kd_module(inputs)
            return output  # unchanged, because a subclass may return tensors other than class scores
        with torch.no_grad():
            teacher_output = self._teacher.module(inputs)
        prepare = super().loss_inputs
        return KDOutput(*(prepare(output, inputs, targets) for output in (outputs, teacher_output)))

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
        model: Any = unwrap_model(runner.model)
        model.load_teacher()


def input_adapter(options: Mapping[str, Any] | None, config_path: str) -> dict[str, Any]:
    """Return the adapter for the teacher's images, from SuperGradients' `kd_module` arguments.

    Raises:
        UnknownNameError: if an argument does not exist.
        ConfigError: if an adapter for the student is set.
    """
    kept = {key: v for key, v in (options or {}).items() if v is not None and key != "num_classes"}
    for key in kept:
        if key not in _ADAPTERS:
            raise UnknownNameError(f"unknown key{did_you_mean(str(key), _ADAPTERS)}", f"{config_path}.{key}")
    if "student_input_adapter" in kept:
        raise ConfigError(
            "is not supported; normalize the images in the dataset", f"{config_path}.student_input_adapter"
        )
    return {key: configuration(value, f"{config_path}.{key}") for key, value in kept.items()}


def check_mode(run_teacher_on_eval: Any) -> None:
    """Raise a ConfigError unless the teacher runs in evaluation mode."""
    if run_teacher_on_eval not in (True, None):
        raise ConfigError("must be True, because the teacher must not change", "run_teacher_on_eval")
