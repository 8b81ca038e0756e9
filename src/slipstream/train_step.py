"""`accelerate`: the Runner's training step, with its speed options, for a custom training loop."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream import checkpoint
from slipstream.checkpoint.matching import MismatchError
from slipstream.checkpoint.weights import compare_weights
from slipstream.dataset.loading.lockstep import equal_on_all_ranks
from slipstream.devices import default_device
from slipstream.dist import all_gather_object, get_rank, get_world_size, is_distributed
from slipstream.dist.placement import unused_launcher
from slipstream.errors import CheckpointError, ConfigError, DataError, LossError, ModelError, SlipstreamError
from slipstream.losses import exchange_low_resolution, reads_low_resolution
from slipstream.model import AveragePart, BaseAveragedModel, EmaOptions, unwrap_model
from slipstream.model.data_preprocessor import BaseDataPreprocessor
from slipstream.optim import OptimWrapper
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.speed.apply import plan_optim, prepare_model, prepare_optim, running, to_device
from slipstream.speed.auto import Capabilities
from slipstream.speed.plan import SpeedPlan, option_rows
from slipstream.speed.steps import ModelLosses, StepSpec, build_step, compiled_scope
from slipstream.step import CompiledStep, Step, sum_losses
from slipstream.typecheck import PositiveInt, check

__all__ = ["BatchLoss", "LossFunction", "TrainStep", "accelerate", "outputs_and_targets", "read_losses"]

LossFunction = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
"""Type of `loss_fn(outputs, targets)`."""
BatchLoss = Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]
"""Type of `compute_loss(model, batch)`."""


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
            function must use the model that it receives, and can call its methods and submodules. Its return value has
            the same form as that of `loss_fn`.

    Raises:
        LossError: raised by the step if a dict that `loss_fn` or `compute_loss` returns has the entry `loss` and other
            losses, because `loss` could be their total.
        ConfigError: an option is invalid or not supported by this function, or there are several processes and the
            optimizer has a parameter that is not in the model.
    """
    losses = read_losses(loss_fn, compute_loss)
    check(total_steps, PositiveInt | None, "total_steps")
    check(batches_per_epoch, PositiveInt | None, "batches_per_epoch")
    _check_optimizer(optimizer, model)
    device = default_device()
    plan = SpeedPlan.read(speed, device=device.type)
    plan = plan.complete(Capabilities.here(device.type, model, world_size=get_world_size()))
    _check_supported(plan, total_steps)
    model = prepare_model(model, plan, device)
    loss_module = to_device(loss_fn, device) if isinstance(loss_fn, nn.Module) else None
    # The model may have been moved after optimizer steps. Step counts (0-dim) may be on the CPU.
    for param, values in optimizer.state.items():
        moved = {k: v.to(param.device) for k, v in values.items() if isinstance(v, Tensor) and v.ndim}
        values.update(moved)
    return TrainStep(model, optimizer, losses, plan, device, total_steps, batches_per_epoch, loss_module)


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
        message = "contains none of the model's parameters; build it from model.parameters()"
        raise ConfigError(message, "optimizer")
    if get_world_size() > 1 and not all(inside):
        raise ConfigError(
            f"{inside.count(False)} of its {len(inside)} parameters are not in the model, and DDP averages only the "
            "model's gradients across processes; put the model and all parameters of the optimizer into one nn.Module",
            "optimizer",
        )


def _check_supported(plan: SpeedPlan, total_steps: int | None) -> None:
    """Raise a `ConfigError` if the user has set an option that requires a Runner."""
    stops = plan.nan_guard is not None and plan.nan_guard.action == "stop"
    ema = plan.ema if isinstance(plan.ema, EmaOptions) else EmaOptions(type="swa")
    for option, is_set, message in (
        ("gc", plan.gc, "requires a Runner; in your own loop, call gc.collect()"),
        ("prefetch", plan.prefetch, "requires a Runner; in your own loop, use: for batch in feed(loader, prefetch=2)"),
        ("nan_guard", stops, "'stop' requires a Runner, which reads the losses; use 'skip', or check them yourself"),
        ("parallel", plan.parallel is not None and plan.parallel.sharded,
         "requires an optimizer built after the model is sharded; use a Runner"),
        ("ema", ema.begin_epoch, "accelerate does not count epochs; use begin_iter instead of begin_epoch"),
        ("ema", ema.type == "exp" and total_steps is None,
         "type 'exp' depends on the number of training steps; pass total_steps, the number of batches (not of "
         "weight updates) in the whole run, to accelerate(), or use ema=dict(type='threshold')"),
    ):  # fmt: skip
        if is_set and not plan.sources[option].startswith("auto"):
            raise ConfigError(message, plan.config_path(option))


class TrainStep:
    """A training step with its state, returned by `accelerate`.

    `inner` is the eager or compiled step. `average` is the averaged model, or None if `ema` is not set. `updated` is
    True if the last call updated the weights. `close()` logs the compile report and restores process-wide settings; it
    is called automatically when the step is deleted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        losses: ModelLosses,
        plan: SpeedPlan,
        device: torch.device,
        total_steps: int | None = None,
        batches_per_epoch: int | None = None,
        loss_module: nn.Module | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self._loss_module, self._total_steps = loss_module, total_steps
        cfg = {"type": "OptimWrapper", **plan_optim({"optimizer": optimizer}, plan, device)}
        self.optim: OptimWrapper = OPTIM_WRAPPERS.build(cfg)
        prepare_optim(self.optim, model, plan, device)
        if self.optim.accumulative_counts > 1:
            # torch warns if a schedule steps before the first update, as in the first accumulation window.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        self.optim.initialize_count_status(model, 0, total_steps or -1, batches_per_epoch)
        logger = logging.getLogger("slipstream")
        messages: list[str] = []  # do not reference self, which would keep the step alive

        def warn(message: str) -> None:
            messages.append(message)
            logger.warning(message)

        self._warnings, self._warn = messages, warn
        if not is_distributed() and (launcher := unused_launcher()):
            warn(
                f"{launcher} started several processes, but there is no process group, so each process trains its own "
                f"model independently. Call slipstream.dist.init_dist('{launcher}') before accelerate()"
            )
        self._compares_ranks = get_world_size() > 1
        self._exit = ExitStack()
        self._exit.enter_context(running(plan, device, logger))
        self._close = weakref.finalize(self, self._exit.close)
        prepare = BaseDataPreprocessor().to(device).cast_data
        self.inner: Step = build_step(StepSpec(model, self.optim, losses, prepare), plan, warn, logger.info)
        if isinstance(self.inner, CompiledStep):
            self._exit.callback(self.inner.close)
        self._average: BaseAveragedModel | None = None
        if isinstance(plan.ema, EmaOptions):
            self._add_average(plan.ema)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch, without device synchronization; return `loss` and other values as 0-dim tensors.

        Raises:
            ModelError: the step was called within `averaged`.
        """
        self._check_not_averaged("the step", ModelError)
        if self._compares_ranks:
            self._compares_ranks = False
            if equal_on_all_ranks(batch):
                self._warn(
                    "All processes train on the same batch, so they repeat each other's work. Pass a "
                    "torch.utils.data.DistributedSampler to the loader, and call its set_epoch before each epoch"
                )
        if self._total_steps is not None and self.steps >= self._total_steps:
            self._warn_once(
                f"Training continues past total_steps={self._total_steps} batches, for which the schedule of ema and "
                "the last accumulation window were computed. total_steps counts all batches, not weight updates; pass "
                "len(loader) * epochs to accelerate()"
            )
        return self.inner(batch)

    def close(self) -> None:
        """Log the compile report and restore process-wide settings; called automatically when the step is deleted.

        Later batches run eagerly if the step was compiled as one graph.
        """
        self._close()

    @property
    def compiled_scope(self) -> str | None:
        """Compiled scope: 'step' (even before its graph is ready), 'model' or 'block'; None if nothing is compiled."""
        return compiled_scope(self.inner, self.model)

    def summary(self) -> str:
        """Return a summary as a string: whether the step is compiled, the options, and the warnings so far."""
        plan, optim, inner = self.plan, self.optim, self.inner
        graph = f", {inner.batches} of them with the graph" if isinstance(inner, CompiledStep) else ""
        lines = [
            f"step: {self._describe_compilation()}; trained on {_count(self.steps, 'batch', 'batches')}{graph}"
        ]
        if (processes := get_world_size()) > 1:
            lines.append(f"processes: {processes}, with averaged gradients")
        for option, value, source, why in option_rows(plan):
            lines.append(f"{option}: {value} ({source}{f': {why}' if why else ''})")
        if (counts := optim.accumulative_counts) > 1:
            state = "complete" if optim.begins_window() else "unfinished: its gradients have not been applied"
            lines.append(
                f"accumulation: {counts} batches per update; the current accumulation window is {state}"
            )
        if self._average is not None:
            lines.append(f"average: {_count(self._average.steps, 'update', 'updates')}")
        return "\n".join([*lines, *(f"warning: {message}" for message in dict.fromkeys(self._warnings))])

    def _describe_compilation(self) -> str:
        inner = self.inner
        if isinstance(inner, CompiledStep) and not self._close.alive:
            return "eager since close()"
        if isinstance(inner, CompiledStep) and inner.uses_graph:
            ready = inner.has_graph
            return "compiled as one graph" if ready else "will be compiled as one graph at the second batch"
        if (scope := self.compiled_scope) is not None:
            return f"eager, with {'a compiled model' if scope == 'model' else 'compiled blocks of the model'}"
        return "eager" if self.plan.compile is None else "eager, although compile is set"

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

    def _add_average(self, options: EmaOptions) -> None:
        optim = self.optim  # a reference to self would keep the step alive
        core, skipped = unwrap_model(self.model), max(options.begin_iter - 1, 0)
        self._average = options.average(core)
        if warning := self._average.start(self._total_steps, skipped, optim.accumulation):
            self._warn(f"{self.plan.config_path('ema')}: {warning}")
        optim.parts.append(AveragePart(self._average, core, lambda: optim.batches, optim, skipped))

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
        self._check_not_averaged("state_dict()", CheckpointError)
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
        self._check_not_averaged("load_state_dict()", CheckpointError)
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
            if saved is not None:
                self._warn_once(
                    "The average in the loaded state is ignored, because ema is off; to continue the average, set ema"
                )
        elif saved is not None:
            average.load_state_dict(saved)
        else:
            # The current average belongs to other weights; the first update copies the loaded weights.
            average.restart(unwrap_model(self.model))

    def _check_not_averaged(self, what: str, error: type[SlipstreamError]) -> None:
        if self._average is not None and self._average.swapped:
            raise error(
                f"{what} cannot be called inside `with step.averaged()`, because the model can contain the averaged "
                "weights there; call it after the block, or use save() and load(), which work everywhere"
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
            if get_world_size() > 1 and not self.optim.begins_window():
                raise CheckpointError(
                    "an accumulation window is unfinished, and each process has its own gradients; save when "
                    "step.updated is True"
                )
            weights = unwrap_model(self.model).state_dict()
            checkpoint.check_restorable(weights)
            content: dict[str, Any] = {"state_dict": weights, "step": self.state_dict(), "values": values}
            content["random_state"] = all_gather_object(checkpoint.get_random_state())
            checkpoint.write_checkpoint(content, Path(path), _refuse)

    def load(self, path: str | Path) -> dict[str, Any]:
        """Load a file written by `save`, and return its `values`. No code in the file is executed.

        Raises:
            CheckpointError: the file is damaged, or belongs to a different model or optimizer. No state is changed.
        """
        with self._swapped_in(average=False):
            content, source, model = checkpoint.load_checkpoint(path), str(path), unwrap_model(self.model)
            checkpoint.check(content, checkpoint.ACCELERATED_FILE, source)
            with _own_remedy():
                compare_weights(model, content["state_dict"], True, source)
            self.check_state(content["step"], source)
            model.load_state_dict(content["state_dict"])
            self.load_state_dict(content["step"])
            states = content.get("random_state") or []
            if get_rank() < len(states):
                checkpoint.set_random_state(states[get_rank()])
            return dict(content.get("values", {}))

    def check_state(self, state: Mapping[str, Any], source: str = "the state") -> None:
        """Check that `state` belongs to this step.

        Args:
            state: a state returned by `state_dict`.
            source: name of the state in error messages.

        Raises:
            CheckpointError: an entry is missing, invalid, or belongs to a different model or optimizer.
        """
        checkpoint.check(state, checkpoint.ACCELERATED, source)
        optim, average, others = self.optim, self.average, self._other_tensors()
        with _own_remedy():
            checkpoint.check_optimizer(optim.optimizer, state["optimizer"], "optimizer", source)
            scaler, saved = optim.loss_scaler, state["optimizer"].get("loss_scaler")
            if scaler is not None and saved not in (None, {}):
                checkpoint.check_like(scaler.state_dict(), saved, "optimizer.loss_scaler", source)
            if average is not None and "average" in state:
                _check_tensors("average", average.state_dict(), state["average"], source)
            _check_tensors("other_tensors", others, state.get("other_tensors", []), source)
            if "gradients" in state:
                gradients = state["gradients"]
                _check_tensors("gradients", list(optim.parameters()), gradients, source, layouts=False)
                is_scaled = bool(scaler and scaler.state_dict())
                if is_scaled != bool(saved) and any(gradient is not None for gradient in gradients):
                    raise CheckpointError(
                        f"{source}: 'gradients' contains the gradients of an unfinished accumulation window "
                        f"{'with' if saved else 'without'} a loss scale; set the precision with which the state was "
                        "saved, or save when step.updated is True"
                    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _check_tensors(key: str, own_tensors: Any, saved_tensors: Any, source: str, layouts: bool = True) -> None:
    """Check the names, shapes and dtypes of tensors in dicts or lists; None marks a missing gradient."""
    own, saved = (
        {str(i): t for i, t in enumerate(each)} if isinstance(each, list) else each
        for each in (own_tensors, saved_tensors)
    )
    if own.keys() != saved.keys():
        names = sorted(map(str, own.keys() ^ saved.keys()))
        raise CheckpointError(
            f"{source}: '{key}' does not match the model, optimizer and loss_fn; entries found in only one of them: "
            f"{names[:5]}"
        )
    tensors = {name: tensor for name, tensor in saved.items() if tensor is not None}
    checkpoint.check_tensors(own, tensors, key, source, warnings.warn, layouts=layouts)


@contextmanager
def _own_remedy() -> Iterator[None]:
    """Within the context, raise each MismatchError, whose remedy is for a Runner, as a CheckpointError."""
    try:
        yield
    except MismatchError as error:
        remedy = "Load it into a step with the model, optimizer and options it was saved with"
        raise CheckpointError(f"{error.problem}. {remedy}") from error


def _refuse(message: str) -> None:
    raise CheckpointError(message.replace("checkpoint.", "", 1))


# ---- losses -------------------------------------------------------------------------------------------


def read_losses(loss_fn: LossFunction | None, compute_loss: BatchLoss | None) -> ModelLosses:
    """Return the function that computes the loss of a batch and the values to log.

    Raises:
        ConfigError: both arguments are set, or one of them is not a function.
    """
    for name, function in {"loss_fn": loss_fn, "compute_loss": compute_loss}.items():
        if function is not None and (not callable(function) or isinstance(function, type)):
            message = f"must be a function, or None if the model returns its loss, not {function!r}"
            raise ConfigError(message, name)
    if loss_fn is not None and compute_loss is not None:
        raise ConfigError("loss_fn and compute_loss exclude each other; remove one of them", "compute_loss")
    if loss_fn is not None:
        low = loss_fn if reads_low_resolution(loss_fn) else None
        return lambda module, batch: _sum(loss_fn(*outputs_and_targets(module, batch, low)))
    if compute_loss is not None:
        return lambda module, batch: _sum(compute_loss(module, batch))
    return _own_loss


def outputs_and_targets(module: nn.Module, batch: Any, loss_fn: Any = None) -> tuple[Any, Any]:
    """Return the module's outputs for a batch, and the targets, or the whole batch if it is a dict.

    If only `loss_fn`, which reads `slipstream.losses.Upsampled`, reads the outputs, and the module supports it, the
    outputs are of this type.

    Raises:
        DataError: the batch is neither a dict nor a list or tuple of at least two elements.
    """
    low = loss_fn is not None and exchange_low_resolution(unwrap_model(module), loss_fn)
    options: dict[str, Any] = {"upsample": False} if low else {}
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return module(*batch[:-1], **options), batch[-1]
    if not isinstance(batch, Mapping):
        raise DataError(
            f"a batch must be (inputs, targets) or a dict, not a {type(batch).__name__}; change the dataset or "
            "collate_fn of the loader"
        )
    return module(**batch, **options), batch


def _own_loss(module: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss that the model computes from a batch, and the values to log.

    The model returns the loss as a tensor, or as the entry or attribute `loss` of its output, which is assumed to
    include the other losses. If a dict output has no key `loss`, the loss is the sum of the entries whose name contains
    `loss`. The other 0-dim tensors of a dict output are logged.

    Raises:
        LossError: the output contains no loss.
    """
    if isinstance(batch, Mapping):
        outputs = module(**batch)
    else:
        outputs = module(batch) if isinstance(batch, Tensor) else module(*batch)
    if isinstance(outputs, Tensor):
        return sum_losses({"loss": outputs})
    entries = dict(outputs) if isinstance(outputs, Mapping) else {}
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    loss = entries.get("loss", getattr(outputs, "loss", None))
    if isinstance(loss, Tensor):
        total, logs = sum_losses({"loss": loss})
        scalars = {name: value.detach() for name, value in tensors.items() if value.ndim == 0}
        return total, {**logs, **scalars, "loss": logs["loss"]}
    if any("loss" in str(name) for name in tensors):
        return sum_losses(tensors)
    keys = f" with the keys {sorted(map(str, entries))}" if entries else ""
    raise LossError(
        f"the model returned an object of type {type(outputs).__name__}{keys}, but no loss; return a scalar, a "
        "dict with the key 'loss' or an object with the attribute 'loss' (for transformers, set return_dict=True and "
        "labels in the batch), or pass loss_fn or compute_loss"
    )


def _sum(loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss to minimize and the values to log, given the result of a loss function.

    Raises:
        LossError: the result is neither a tensor nor a dict, or it is unclear whether the entry `loss` is the sum of
            the other losses or one of them.
    """
    if isinstance(loss, Tensor):
        return (loss, {"loss": loss.detach()}) if loss.ndim == 0 else sum_losses({"loss": loss})
    if not isinstance(loss, Mapping):
        raise LossError(
            "the loss function must return a scalar tensor or a dict of scalar tensors, not "
            f"{type(loss).__name__}; return its attribute 'loss' if it has one, and do not call item()"
        )
    others = [name for name in loss if name != "loss" and "loss" in name]
    if others and "loss" in loss:
        raise LossError(
            f"the dict contains 'loss' and {others}, and all of them would be summed. If 'loss' is the total, remove "
            f"it, or log {others} under names without 'loss'. Otherwise, rename 'loss'"
        )
    return sum_losses(loss)
