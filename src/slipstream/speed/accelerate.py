"""`accelerate`: the Runner's training step, with its speed options, for a custom training loop."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.devices import default_device
from slipstream.dist import get_world_size, is_distributed
from slipstream.dist.placement import unused_launcher
from slipstream.errors import CheckpointError, ConfigError, ModelError
from slipstream.model import AveragePart, BaseAveragedModel, EmaOptions, unwrap_model
from slipstream.model.data_preprocessor import BaseDataPreprocessor
from slipstream.optim import OptimWrapper
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.speed.apply import (
    add_parts,
    compiling,
    plan_optim,
    prepare_model,
    process_settings,
    select_kernels,
    to_device,
)
from slipstream.speed.auto import Capabilities
from slipstream.speed.losses import BatchLoss, LossFunction, ModelLosses, read_losses
from slipstream.speed.plan import SpeedPlan, no_effect
from slipstream.speed.step_state import (
    check_step_state,
    describe_compilation,
    describe_step,
    load_step,
    save_step,
)
from slipstream.speed.steps import StepSpec, build_step, compiled_scope
from slipstream.step import CompiledStep, Step
from slipstream.typecheck import PositiveInt, check

__all__ = ["TrainStep", "accelerate"]

_UNSUPPORTED = {
    "gc": "requires a Runner; in your own loop, call gc.collect()",
    "nan_guard": "requires a Runner, which monitors the losses; in your own loop, check them yourself",
    "prefetch": "requires a Runner; in your own loop, use: for batch in feed(loader, prefetch=2)",
}
"""Options that `accelerate` does not support, with their alternatives."""


def accelerate(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFunction | None = None,
    speed: str | SpeedPlan | Mapping[str, Any] | None = "auto",
    total_steps: int | None = None,
    batches_per_epoch: int | None = None,
    compute_loss: BatchLoss | None = None,
) -> TrainStep:
    """Return a training step: `log = step(batch)` runs forward, loss, backward, gradient sync, clipping and update.

    If a process group exists (from `slipstream.dist.init_dist` or torch), gradients are averaged over its processes.
    The model, and `loss_fn` if it is a module, are moved to the accelerator in place.

    The loss is computed by `loss_fn`, by `compute_loss`, or, if neither is set, by the model. In the last case, a batch
    that is a dict is passed to the model as keyword arguments, and a tuple as positional arguments. The model returns a
    scalar, an object with the attribute or key `loss`, or a dict whose entries with `loss` in their name are summed.

    Args:
        model: any module.
        optimizer: an optimizer for the model's parameters. In a single process, it can contain other parameters too;
            `save` includes them, but `ema` does not average them.
        loss_fn: `loss_fn(outputs, targets)`, where each batch is `(inputs, targets)` or `(*inputs, targets)`. It
            returns a scalar tensor, or a dict whose entries with `loss` in their name are summed. If a batch is a dict,
            its entries are passed to the model as keyword arguments, and `loss_fn` is called with the outputs and the
            batch.
        speed: `'auto'`, a dict of the fields of `SpeedPlan`, or None for no options.
        total_steps: number of batches (calls to the step, not weight updates) in the whole training run; required for
            `ema` of type 'exp'. With `accumulate`, the last accumulation window then ends with the last batch, even if
            this window is smaller than the others. If neither this argument nor `batches_per_epoch` is set, the
            gradients of an incomplete last window are not applied. A warning is logged if training continues after this
            many batches.
        batches_per_epoch: number of batches per epoch (`len(loader)`). With `accumulate`, the last accumulation window
            then ends at the end of the epoch. If this window is smaller, its losses are divided by its own size. By
            default, a window continues with the first batches of the next epoch.
        compute_loss: `compute_loss(model, batch)`, for other losses, such as a loss that uses several models. The
            function must call the model that it receives. Its return value has the same form as that of `loss_fn`.

    Raises:
        LossError: raised by the step if a dict that `loss_fn` or `compute_loss` returns has the entry `loss` and other
            losses, because `loss` could be their total.
        ConfigError: an option is invalid or not supported by this function, or there are several processes and the
            optimizer has a parameter that is not in the model.
        ModelError: the optimizer has a parameter on a different device than the model.
    """
    _check_optimizer(optimizer, model)
    losses = read_losses(loss_fn, compute_loss)
    check(total_steps, PositiveInt | None, "total_steps")
    check(batches_per_epoch, PositiveInt | None, "batches_per_epoch")
    device = default_device()
    plan, no_effect = _complete_plan(speed, model, device)
    prepared = prepare_model(model, plan, device)
    if isinstance(loss_fn, nn.Module):
        to_device(loss_fn, device)
    _check_devices(optimizer, model, device)
    _move_state(optimizer)
    loss_module = loss_fn if isinstance(loss_fn, nn.Module) else None
    return TrainStep(
        prepared, optimizer, losses, plan, device, total_steps, batches_per_epoch, loss_module, no_effect
    )


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Check that `optimizer` is a torch optimizer for the model's parameters.

    Raises:
        ConfigError: `optimizer` has a different type, contains none of the model's parameters, or, with several
            processes, contains a parameter that is not in the model.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"must be a torch.optim.Optimizer, not {type(optimizer).__name__}; for several optimizers, create one step "
            "for each",
            "optimizer",
        )
    own = set(model.parameters())
    inside = [param in own for group in optimizer.param_groups for param in group["params"]]
    if not any(inside):
        raise ConfigError(
            "contains none of the model's parameters; build it from model.parameters()", "optimizer"
        )
    if get_world_size() > 1 and not all(inside):
        raise ConfigError(
            f"{inside.count(False)} of its {len(inside)} parameters are not in the model, and DDP averages only the "
            "model's gradients across processes; put the model and all parameters of the optimizer "
            "into one nn.Module",
            "optimizer",
        )


def _complete_plan(speed: Any, model: nn.Module, device: torch.device) -> tuple[SpeedPlan, Mapping[str, str]]:
    """Return the plan for `speed` on this machine, and the options that have no effect, with the reasons.

    Raises:
        ConfigError: an option is invalid or not supported by `accelerate`.
    """
    capabilities = Capabilities.here(device.type, model, world_size=get_world_size())
    plan = SpeedPlan.read(speed, device=device.type).complete(capabilities)
    for option, remedy in _UNSUPPORTED.items():
        if getattr(plan, option) and not plan.sources[option].startswith("auto"):
            raise ConfigError(remedy, plan.config_path(option))
    if plan.parallel is not None and plan.parallel.sharded:
        raise ConfigError(
            "requires an optimizer built after the model is sharded; use a Runner",
            plan.config_path("parallel"),
        )
    return plan, no_effect(plan, capabilities)


def _check_devices(optimizer: Optimizer, model: nn.Module, device: torch.device) -> None:
    """Check that all parameters of the optimizer are on the model's device type.

    Raises:
        ModelError: a parameter is on a different type of device.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.device.type != device.type:
                raise ModelError(
                    f"the optimizer contains a parameter of shape {tuple(param.shape)} on {param.device}, but "
                    f"the model is on {device}. If part of the model was moved after the optimizer was built, build "
                    f"the optimizer after the move. If the parameter is not part of the model, move it to {device}"
                )


def _move_state(optimizer: Optimizer) -> None:
    """Move the optimizer state to the devices of the parameters, in case the model was moved after optimizer steps."""
    for param, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:  # step counts (0-dim) may be on the CPU
                values[name] = value.to(param.device)


class TrainStep:
    """A training step with its state, returned by `accelerate`.

    `average` is the averaged model, or None if `ema` is not set. `updated` is True if the last call updated the
    weights. `close()` logs the compile report and restores process-wide settings; it is called automatically when the
    step is deleted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        losses: ModelLosses,
        plan: SpeedPlan,
        device: torch.device,
        total_steps: int | None,
        batches_per_epoch: int | None = None,
        loss_module: nn.Module | None = None,
        no_effect: Mapping[str, str] | None = None,
    ) -> None:
        self.model = model
        """The model, wrapped in DDP if there are several processes."""
        self.plan = plan
        self.no_effect = dict(no_effect or {})
        """The options that have no effect on this machine, with the reasons."""
        self._loss_module = loss_module
        self.optim: OptimWrapper = OPTIM_WRAPPERS.build(
            {"type": "OptimWrapper", **plan_optim({"optimizer": optimizer}, plan, device)}
        )
        select_kernels(self.optim, plan, device)
        add_parts(plan, model, self.optim)
        if self.optim.accumulative_counts > 1:
            # torch warns if a schedule steps before the first update, as in the first accumulation window.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self._total_steps = total_steps
        self.optim.initialize_count_status(model, 0, total_steps or -1, batches_per_epoch)
        move = BaseDataPreprocessor().to(device)
        logger = logging.getLogger("slipstream")
        messages: list[str] = []  # do not reference self, which would keep the step alive
        self._warnings = messages

        def warn(message: str) -> None:
            messages.append(message)
            logger.warning(message)

        self._warn: Callable[[str], None] = warn
        if not is_distributed() and (launcher := unused_launcher()):
            warn(
                f"{launcher} started several processes, but there is no process group, so each process trains its own "
                f"model independently. Call slipstream.dist.init_dist('{launcher}') before accelerate()"
            )
        for option, reason in self.no_effect.items():
            logger.info(f"{plan.sources[option]} has no effect here: {reason}")
        self._exit = ExitStack()
        self._exit.enter_context(process_settings(plan, device))
        self._exit.enter_context(compiling(plan, logger))
        self._close = weakref.finalize(self, self._exit.close)
        # The compiled scope and the description of the compilation just before `close`; None if the step is not closed.
        self._at_close: tuple[str | None, str] | None = None
        spec = StepSpec(model, self.optim, losses, move.cast_data)
        self._step: Step = build_step(spec, plan, warn, logger.info)
        if isinstance(self._step, CompiledStep):
            self._exit.callback(self._step.close)
        self._average: BaseAveragedModel | None = None
        if isinstance(plan.ema, EmaOptions):
            self._add_average(plan.ema, total_steps)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch, without device synchronization; return `loss` and other values as 0-dim tensors.

        Raises:
            ModelError: the step was called within `averaged`.
        """
        if self._may_be_averaged():
            raise ModelError(
                "the step cannot be called inside `with step.averaged()`, because it would train the averaged weights; "
                "call it after the block"
            )
        if self._total_steps is not None and self.steps >= self._total_steps:
            self._warn_once(
                f"Training continues past total_steps={self._total_steps} batches, but the schedule of ema and the "
                "last accumulation window were computed for that length. total_steps is the number of batches in the "
                "whole run, not of weight updates; pass len(loader) * epochs to accelerate()"
            )
        return self._step(batch)

    def close(self) -> None:
        """Log the compile report and restore process-wide settings; called automatically when the step is deleted.

        Later batches run eagerly if the step was compiled as one graph.
        """
        if self._close.alive:
            self._at_close = self.compiled_scope, describe_compilation(self, closed=True)
        self._close()

    @property
    def compiled_scope(self) -> str | None:
        """Compiled scope: 'step' (even before its graph is ready), 'model' or 'block'; None if nothing is compiled.

        After `close`, this is the scope before `close`.
        """
        return compiled_scope(self._step, self.model) if self._at_close is None else self._at_close[0]

    @property
    def inner(self) -> Step:
        """The eager or compiled step."""
        return self._step

    def summary(self) -> str:
        """Return a summary as a string: whether the step is compiled, the options, and the warnings so far."""
        compilation = describe_compilation(self) if self._at_close is None else self._at_close[1]
        return "\n".join(describe_step(self, compilation, self._warnings))

    @property
    def steps(self) -> int:
        """Number of batches trained on, including those before a resume."""
        return self.optim.batches

    @property
    def average(self) -> BaseAveragedModel | None:
        """The averaged model, with the current values of buffers that are not averaged, or None without `ema`."""
        if self._average is not None:
            self._average.copy_buffers(unwrap_model(self.model))
        return self._average

    @property
    def updated(self) -> bool:
        """Whether the last call updated the weights; with `accumulate`, whether it ended an accumulation window.

        Reading this property does not synchronize with the device. The value is False before the first batch. With
        float16, it is also True if the update was skipped because a gradient overflowed.
        """
        return self.steps > 0 and self.optim.begins_window()

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings:
            self._warn(message)

    def _add_average(self, options: EmaOptions, total_steps: int | None) -> None:
        path = self.plan.config_path("ema")
        if options.begin_epoch:
            raise ConfigError("accelerate does not count epochs; use begin_iter instead of begin_epoch", path)
        if options.type == "exp" and total_steps is None:
            raise ConfigError(
                "type 'exp' depends on the number of training steps; pass total_steps, the number of batches (not of "
                "weight updates) in the whole run, to accelerate(), or use ema=dict(type='threshold')",
                path,
            )
        optim = self.optim  # a reference to self would keep the step alive
        core, skipped = unwrap_model(self.model), max(options.begin_iter - 1, 0)
        self._average = options.average(core)
        if warning := self._average.start(
            total_steps, skipped, optim.accumulative_counts, optim.accumulation.batches_per_epoch
        ):
            self._warn(f"{path}: {warning}")
        optim.parts.append(
            AveragePart(self._average, core, lambda: optim.batches, optim.ends_window, skipped)
        )

    def averaged(self) -> AbstractContextManager[nn.Module]:
        """Swap the averaged weights into the unwrapped model within the context.

        Without `ema`, the model is unchanged, and the first call logs a warning.
        """
        if self._average is None:
            self._warn_once("The option ema is off, so averaged() yields the model itself")
        return self._swapped_in(average=True)

    def _swapped_in(self, average: bool) -> AbstractContextManager[nn.Module]:
        core = unwrap_model(self.model)
        return nullcontext(core) if self._average is None else self._average.swapped_in(core, average)

    def state_dict(self) -> dict[str, Any]:
        """Return the training state, except the state of the model.

        This includes the optimizer, its parameters that are not in the model, the parameters and buffers of `loss_fn`,
        the loss scale, the averaged weights, the number of steps, and the gradients of an unfinished accumulation
        window.

        Raises:
            CheckpointError: the method was called within `averaged`.
        """
        self._check_not_averaged("state_dict")
        state: dict[str, Any] = {"optimizer": self.optim.state_dict(), "steps": self.steps}
        if others := self._other_tensors():
            state["other_tensors"] = [tensor.detach() for tensor in others]
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if not self.optim.begins_window():
            state["gradients"] = [param.grad for param in self.optim.parameters()]
            state["unfinished"] = self.optim.accumulation.unfinished
            state["window"] = self.optim.accumulation.size
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`, including the gradients of an unfinished accumulation window.

        Raises:
            CheckpointError: an entry is missing, invalid, or belongs to a different model or optimizer, or the method
                was called within `averaged`. No state is changed.
        """
        self._check_not_averaged("load_state_dict")
        self.check_state(state)
        self.optim.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for tensor, saved in zip(self._other_tensors(), state.get("other_tensors", []), strict=True):
                tensor.copy_(saved)
        self._load_average(state)
        params = list(self.optim.parameters())
        for param, grad in zip(params, state.get("gradients", [None] * len(params)), strict=True):
            param.grad = None if grad is None else grad.to(param, copy=True)
        # Call this after loading the gradients, which show whether the accumulation window is unfinished.
        per_epoch = self.optim.accumulation.batches_per_epoch
        self.optim.initialize_count_status(self.model, state["steps"], self._total_steps or -1, per_epoch)
        self.optim.resume_window(
            state.get("unfinished", self.optim.accumulation.unfinished), state.get("window")
        )

    def _load_average(self, state: Mapping[str, Any]) -> None:
        saved, average = state.get("average"), self._average
        if average is None:
            if saved is not None and saved["steps"] > 0:
                self._warn_once(
                    "The loaded state contains an average, which is ignored, because the option ema is off. The step "
                    "trains the unaveraged weights, and averaged() yields them. To continue the average, set ema"
                )
        elif saved is not None:
            average.load_state_dict(saved)
        else:
            # The current average belongs to other weights; the first update copies the loaded weights.
            average.restart(unwrap_model(self.model))
            if state["steps"] > 0:
                self._warn_once(
                    "The loaded state contains no average, so the average starts again from the loaded weights at the "
                    "next update. To continue without an average, remove ema"
                )

    def _may_be_averaged(self) -> bool:
        """Return whether the weights are swapped with the average, or the code runs inside `averaged()`."""
        return self._average is not None and (self._average.selected or self._average.swapped)

    def _check_not_averaged(self, method: str) -> None:
        if self._may_be_averaged():
            raise CheckpointError(
                f"{method}() cannot be called inside `with step.averaged()`, because the model can contain the "
                "averaged weights there; call it after the block, or use save() and load(), which work everywhere"
            )

    def _other_tensors(self) -> list[Tensor]:
        """Return the tensors of the optimizer and `loss_fn` that training can change and that are not in the model."""
        found: list[Tensor] = list(self.optim.parameters())
        if self._loss_module is not None:
            found += [*self._loss_module.parameters(), *self._loss_module.buffers()]
        inside = {*self.model.parameters(), *self.model.buffers()}
        return [tensor for tensor in dict.fromkeys(found) if tensor not in inside]

    def save(self, path: str | Path, /, **values: Any) -> None:
        """Write a single file with all state that is required to resume training. All processes must call this method.

        The file contains the model, the result of `state_dict`, and the random states of torch, NumPy and Python. It is
        written atomically, and its `state_dict` entry contains the model's weights.

        Args:
            path: path of the file. It is positional-only, so `values` may also contain `path=`.
            values: additional state that `load` returns, such as `epoch=epoch, schedule=schedule.state_dict()`. It may
                contain tensors and built-in Python values.

        Raises:
            CheckpointError: the file cannot be written, a value has an unsupported type, or an accumulation window is
                unfinished and there are several processes.
        """
        with self._swapped_in(average=False):
            save_step(self, path, values)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a file written by `save`, and return its `values`. No code in the file is executed.

        Raises:
            CheckpointError: the file is damaged, or belongs to a different model or optimizer. No state is changed.
        """
        with self._swapped_in(average=False):
            return load_step(self, path)

    def check_state(self, state: Mapping[str, Any], source: str = "the state") -> None:
        """Check that `state` belongs to this step.

        Args:
            state: a state returned by `state_dict`.
            source: name of the state in error messages.

        Raises:
            CheckpointError: an entry is missing, invalid, or belongs to a different model or optimizer.
        """
        check_step_state(self, state, self._other_tensors(), source)
