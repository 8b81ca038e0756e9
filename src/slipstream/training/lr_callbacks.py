"""SuperGradients' `LRCallbackBase`: user-defined learning-rate schedules, written as callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, ModelError
from slipstream.hooks import Hook
from slipstream.model import unwrap_model
from slipstream.registry import HOOKS, PARAM_SCHEDULERS
from slipstream.training.callbacks import CallbackHook, stage_of
from slipstream.training.params import TrainingParams
from slipstream.training.phases import Phase, PhaseCallback, PhaseContext

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["LRCallbackBase", "LRCallbackHook", "split_schedule"]

_BASE_ARGUMENTS = ("phase", "initial_lr", "update_param_groups", "train_loader_len", "net", "training_params")
"""Arguments of `LRCallbackBase` that are not keys of `training_params`."""
_KEY = "lr_callback"
"""Name under which the message hub stores the schedule's `lr`. Checkpoints contain the values in the hub."""


class LRCallbackBase(PhaseCallback):
    """Base class for learning-rate schedules; pass a subclass, or its registered name, as `lr_mode`.

    Subclasses define `is_lr_scheduling_enabled` and `perform_scheduling`, which sets `lr` and calls `update_lr`. If the
    constructor of a subclass has further parameters, they receive the values of the `training_params` keys with the
    same names.

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
        self.net = net
        self.training_params = training_params

    def __call__(self, context: PhaseContext) -> None:
        """Change the learning rates if scheduling is enabled."""
        if self.is_lr_scheduling_enabled(context):
            self.perform_scheduling(context)

    def is_lr_scheduling_enabled(self, context: PhaseContext) -> bool:
        """Return whether to call `perform_scheduling`."""
        raise NotImplementedError(f"{type(self).__name__} must define is_lr_scheduling_enabled(context)")

    def perform_scheduling(self, context: PhaseContext) -> None:
        """Change `lr`, and call `update_lr`."""
        raise NotImplementedError(f"{type(self).__name__} must define perform_scheduling(context)")

    def update_lr(self, optimizer: Any, epoch: int, batch_idx: int | None = None) -> None:
        """Set the learning rate of each parameter group: the rate for its name prefix, or `lr` if `lr` is a number."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr[_prefix(group, self.lr)] if isinstance(self.lr, Mapping) else self.lr


@HOOKS.register_module()
class LRCallbackHook(Hook):
    """Build a schedule when training starts, and call it at its phase.

    Checkpoints contain the schedule's `lr` attribute (a number or a dict of numbers), and a resumed run restores it.
    Other attributes are not saved.

    Args:
        schedule: a subclass of `LRCallbackBase`.
        params: the values of `training_params` that the schedule receives.
    """

    priority = "LOW"
    sets_learning_rate = True

    def __init__(self, schedule: type[LRCallbackBase], params: Mapping[str, Any]) -> None:
        self.schedule, self.params = schedule, dict(params)
        self._callback: LRCallbackBase | None = None
        self._hook: CallbackHook | None = None
        self._stage: str | None = None

    def before_train(self, runner: Runner) -> None:
        """Build the schedule.

        Raises:
            ModelError: if the model has no `network` attribute.
        """
        model: Any = unwrap_model(runner.model)
        if not hasattr(model, "network"):
            raise ModelError(
                f"{self.schedule.__name__} requires a SupervisedModel, not {type(model).__name__}"
            )
        callback = self.schedule(
            update_param_groups=False,
            train_loader_len=runner.train_loop.epoch_length,
            net=model.network,
            training_params=SimpleNamespace(**self.params),
            **self.params,
        )
        self._callback, self._hook, self._stage = callback, CallbackHook(callback), stage_of(callback.phase)
        self._restore(runner)
        self._call_at("before_train", runner)

    def before_train_epoch(self, runner: Runner) -> None:
        """Call the schedule if its phase is `TRAIN_EPOCH_START`."""
        self._call_at("before_train_epoch", runner)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Call the schedule if its phase is `TRAIN_BATCH_END` or `TRAIN_BATCH_STEP`."""
        self._call_at("after_train_iter", runner, batch_idx=batch_idx, data_batch=data_batch, outputs=outputs)

    def after_train_epoch(self, runner: Runner) -> None:
        """Call the schedule if its phase is `TRAIN_EPOCH_END`."""
        self._call_at("after_train_epoch", runner)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Call the schedule if its phase is `VALIDATION_EPOCH_END`."""
        if runner.is_training:
            self._call_at("after_val_epoch", runner, metrics=metrics)

    def _call_at(self, stage: str, runner: Runner, **values: Any) -> None:
        if self._hook is not None and stage == self._stage:
            method = self._hook.method_at(stage)
            assert method is not None, "the callback must handle an event at this stage"
            method(runner, **values)
            self._store(runner)

    def _store(self, runner: Runner) -> None:
        assert self._callback is not None, "the schedule must have been called"
        rates = self._callback.lr
        if isinstance(rates, Mapping):
            runner.message_hub.update_info(_KEY, {name: float(rate) for name, rate in rates.items()})
        elif isinstance(rates, Real):
            runner.message_hub.update_info(_KEY, float(rates))

    def _restore(self, runner: Runner) -> None:
        callback = self._callback
        if callback is None:
            return
        saved = runner.message_hub.get_info(_KEY, callback.initial_lr)
        # If the parameter groups differ from those of the resumed run, the saved rates do not apply.
        if not isinstance(saved, Mapping) or saved.keys() == callback.initial_lr.keys():
            callback.lr = dict(saved) if isinstance(saved, Mapping) else saved


def split_schedule(training_params: Any) -> tuple[Any, Hook | None]:
    """Return `training_params` without the keys of a user-defined schedule, and a hook that calls the schedule.

    If `lr_mode` is not a user-defined schedule, the hook is None.

    Raises:
        ConfigError: if `initial_lr` is missing, or `phase_callbacks` contains a schedule.
    """
    if not isinstance(training_params, Mapping):
        return training_params, None  # `TrainingParams.read` raises the error
    for index, callback in enumerate(training_params.get("phase_callbacks") or ()):
        if isinstance(callback, LRCallbackBase):
            raise ConfigError(
                f"{type(callback).__name__} is a learning-rate schedule; set lr_mode to its class",
                f"training_params.phase_callbacks[{index}]",
            )
    schedule = _schedule(training_params.get("lr_mode"))
    if schedule is None:
        return dict(training_params), None
    own = {
        name
        for kind in schedule.__mro__
        if issubclass(kind, LRCallbackBase) and kind is not LRCallbackBase and "__init__" in vars(kind)
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD and name not in _BASE_ARGUMENTS
    }
    known = {field.name for field in fields(TrainingParams)}
    rest = {k: v for k, v in training_params.items() if k != "lr_mode" and (k in known or k not in own)}
    parsed = TrainingParams.read(rest)
    if parsed.initial_lr is None:
        raise ConfigError("is required", "training_params.initial_lr")
    values = {name: getattr(parsed, name) for name in known - {"lr_mode"}}
    values |= {key: training_params[key] for key in own & training_params.keys()}
    return rest, LRCallbackHook(schedule, values)


def _schedule(lr_mode: Any) -> type[LRCallbackBase] | None:
    found = PARAM_SCHEDULERS.get(lr_mode) if isinstance(lr_mode, str) else lr_mode
    return found if inspect.isclass(found) and issubclass(found, LRCallbackBase) else None


def _prefix(group: Mapping[str, Any], rates: Mapping[str, float]) -> str:
    """Return the first prefix in a parameter group's name that has an entry in `rates`, or `default` if none has."""
    return next((name for name in str(group.get("name", "")).split(", ") if name in rates), "default")
