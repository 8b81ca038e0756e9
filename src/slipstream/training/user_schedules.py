"""User-defined schedules: SuperGradients' `LRCallbackBase` and `IDecayFunction`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError
from slipstream.hooks import EMAHook, Hook
from slipstream.model import ScheduledEMA, unwrap_model
from slipstream.registry import HOOKS, PARAM_SCHEDULERS
from slipstream.training.callbacks import CallbackHook, Phase, PhaseCallback, PhaseContext
from slipstream.training.params import TrainingParams

if TYPE_CHECKING:
    from slipstream.runner import Runner

# Name under which the message hub stores the schedule's `lr`. Checkpoints contain the values in the hub.
_KEY = "lr_callback"


class LRCallbackBase(PhaseCallback):
    """Base class for learning-rate schedules; pass a subclass, or its registered name, as `lr_mode`.

    Subclasses define `is_lr_scheduling_enabled` and `perform_scheduling`, which sets `lr` and calls `update_lr`. If the
    constructor of a subclass has further parameters, they receive the values of the `training_params` keys with the
    same names. Checkpoints contain `lr` (a number or a dict of numbers); other attributes are not saved.

    Args:
        phase: when the schedule is called.
        initial_lr: the initial learning rate, or a dict that maps name prefixes to initial learning rates.
        update_param_groups: always False.
        train_loader_len: number of batches in an epoch.
        net: the network.
        training_params: an object with the keys of `training_params` as attributes.
        kwargs: not used.
    """

    def __init__(
        self,
        phase: Phase | str,
        initial_lr: float | Mapping[str, float],
        update_param_groups: bool,
        train_loader_len: int,
        net: Any,
        training_params: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(phase)
        rates = initial_lr if isinstance(initial_lr, Mapping) else {"default": initial_lr}
        self.initial_lr: Any = {name: float(rate) for name, rate in rates.items()}
        self.lr: Any = dict(self.initial_lr)
        self.update_param_groups = update_param_groups
        self.train_loader_len = train_loader_len
        self.net, self.training_params = net, training_params

    def __call__(self, context: PhaseContext) -> None:
        """Change the learning rates if scheduling is enabled, and store them in the message hub."""
        if self.is_lr_scheduling_enabled(context):
            self.perform_scheduling(context)
            is_dict = isinstance(self.lr, Mapping)
            stored = {name: float(lr) for name, lr in self.lr.items()} if is_dict else float(self.lr)
            context.runner.message_hub.update_info(_KEY, stored)

    def is_lr_scheduling_enabled(self, context: PhaseContext) -> bool:
        """Return whether to call `perform_scheduling`."""
        raise NotImplementedError(f"{type(self).__name__} must define is_lr_scheduling_enabled(context)")

    def perform_scheduling(self, context: PhaseContext) -> None:
        """Change `lr`, and call `update_lr`."""
        raise NotImplementedError(f"{type(self).__name__} must define perform_scheduling(context)")

    def update_lr(self, optimizer: Any, epoch: int, batch_idx: int | None = None) -> None:
        """Set the learning rate of each parameter group: the rate for its name prefix, or `lr` if `lr` is a number."""
        for group in optimizer.param_groups:
            prefixes = str(group.get("name", "")).split(", ")
            is_dict = isinstance(self.lr, Mapping)
            key = next((name for name in prefixes if is_dict and name in self.lr), "default")
            group["lr"] = self.lr[key] if is_dict else self.lr


@HOOKS.register_module()
class LRCallbackHook(Hook):
    """Build a schedule when training starts, and register a `CallbackHook` that calls it.

    Args:
        schedule: a subclass of `LRCallbackBase`.
        params: the values of `training_params` that the schedule receives.
    """

    priority = "LOW"
    sets_learning_rate = True

    def __init__(self, schedule: type[LRCallbackBase], params: Mapping[str, Any]) -> None:
        self.schedule, self.params = schedule, dict(params)

    def before_train(self, runner: Runner) -> None:
        """Build the schedule, with the learning rates of the resumed checkpoint, if any."""
        model: Any = unwrap_model(runner.model)
        callback = self.schedule(
            update_param_groups=False,
            train_loader_len=runner.train_loop.epoch_length,
            net=model.network,
            training_params=SimpleNamespace(**self.params),
            **self.params,
        )
        saved = runner.message_hub.get_info(_KEY, callback.initial_lr)
        # If the parameter groups differ from those of the resumed run, the saved rates do not apply.
        if not isinstance(saved, Mapping) or saved.keys() == callback.initial_lr.keys():
            callback.lr = dict(saved) if isinstance(saved, Mapping) else saved
        hook = CallbackHook(callback)
        runner.register_hook(hook, self.priority)
        if method := hook.method_at("before_train"):
            method(runner)


def split_schedule(training_params: Any) -> tuple[Any, Hook | None]:
    """Return `training_params` without the keys of a user-defined schedule, and a hook that calls the schedule.

    If `lr_mode` is not a user-defined schedule, the hook is None.

    Raises:
        ConfigError: if `initial_lr` is missing, or `phase_callbacks` contains a schedule.
    """
    if not isinstance(training_params, Mapping):
        return training_params, None  # `TrainingParams.read` raises the error
    if any(isinstance(entry, LRCallbackBase) for entry in training_params.get("phase_callbacks") or ()):
        raise ConfigError("pass the class of a schedule as lr_mode", "training_params.phase_callbacks")
    lr_mode = training_params.get("lr_mode")
    schedule = PARAM_SCHEDULERS.get(lr_mode) if isinstance(lr_mode, str) else lr_mode
    if not (inspect.isclass(schedule) and issubclass(schedule, LRCallbackBase)):
        return dict(training_params), None
    known = {field.name for field in fields(TrainingParams)}
    own = {name for kind in schedule.__mro__[:-1] for name in inspect.signature(kind).parameters}
    rest = {k: v for k, v in training_params.items() if k != "lr_mode" and (k in known or k not in own)}
    parsed = TrainingParams.read(rest)
    if parsed.initial_lr is None:
        raise ConfigError("is required", "training_params.initial_lr")
    values = {name: getattr(parsed, name) for name in known - {"lr_mode"}}
    values |= {key: training_params[key] for key in own & training_params.keys()}
    return rest, LRCallbackHook(schedule, values)


class IDecayFunction:
    """Base class for decay schedules. Subclasses accept the other keys of `ema_params` as keyword arguments."""

    def __call__(self, decay: float, step: int, total_steps: int) -> float:
        """Return the decay after `step` of `total_steps` batches.

        Args:
            decay: the value of `ema_params.decay`.
            step: number of completed batches, starting at 1.
            total_steps: number of batches in the training run.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(decay, step, total_steps)")


# User-defined decay schedules by name, for example `EMA_DECAY_FUNCTIONS["linear"] = LinearDecay`.
EMA_DECAY_FUNCTIONS: dict[str, type[IDecayFunction]] = {}


def split_decay(params: TrainingParams) -> tuple[TrainingParams, EMAHook | None]:
    """Return the parameters with `ema` disabled, and an EMA hook with the user-defined schedule that they select.

    If they do not select such a schedule, return `params` unchanged and None.

    Raises:
        ConfigError: if the schedule does not accept the keys of `ema_params`.
    """
    options: dict[str, Any] = dict(params.ema_params)
    name = options.pop("decay_type", None)
    if not params.ema or name not in EMA_DECAY_FUNCTIONS:
        return params, None
    decay = options.pop("decay", 0.9999)
    try:
        function = EMA_DECAY_FUNCTIONS[name](**options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}", "training_params.ema_params") from None
    average = partial(ScheduledEMA, decay=decay, decay_type="constant", count="batches", function=function)
    hook = EMAHook(average)
    hook.option = "training_params.ema"
    return replace(params, ema=False, ema_params={}), hook
