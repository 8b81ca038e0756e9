"""Build schedulers, including torch schedulers, from configurations."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from slipstream.errors import ConfigError
from slipstream.optim.scheduler.base import INF, _ParamScheduler
from slipstream.optim.scheduler.param_scheduler import OneCycleParamScheduler
from slipstream.registry import PARAM_SCHEDULERS
from slipstream.typecheck import PositiveInt, check, is_number, short_repr

# The numbers of epochs and iterations in the run.
_Ends: TypeAlias = tuple[int | None, int | None]


class TorchSchedulerAdapter:
    """Adapt a scheduler from `torch.optim.lr_scheduler` to this package's scheduler interface.

    All other attributes are those of the scheduler.

    Args:
        scheduler: the scheduler, built for the torch optimizer; it is active from step 0.
        by_epoch: whether the caller calls `step` after each epoch; otherwise, `step` is called after each iteration.
        end: first step after the active steps.
    """

    need_val_args = False
    per_update: bool | None = None

    def __init__(self, scheduler: LRScheduler, by_epoch: bool = True, end: int = INF) -> None:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "torch's ReduceLROnPlateau is not supported; use ReduceOnPlateauLR, which has a 'monitor' option"
            )
        self.by_epoch = by_epoch
        self.end = end
        self._global_step = 0
        self._offset = getattr(scheduler, "last_epoch", 0)
        # Suppress torch's warning that `optimizer.step` has not been called, because compiled steps do not call it.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.scheduler = scheduler  # last, because the scheduler may have attributes of the same names

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # unpickling accesses it before it is set
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("scheduler")
        own = name in vars(self) or hasattr(type(self), name) or not hasattr(inner, name)
        object.__setattr__(self if own else inner, name, value)

    def step(self) -> None:
        """Advance by one step, and update the learning rates if the step is before `end`."""
        self._global_step += 1
        if self._global_step < self.end:
            self.scheduler.step()

    def get_last_value(self) -> list[Any]:
        """Return the learning rate of every parameter group, as a tensor if the group's `lr` is a tensor."""
        return list(self.scheduler.get_last_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's progress and its state."""
        return {"_global_step": self._global_step, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict()`."""
        self._global_step = state_dict["_global_step"]
        self.scheduler.load_state_dict(state_dict["scheduler"])
        due = min(self._global_step, self.end - 1) + self._offset
        if getattr(self.scheduler, "last_epoch", due) == due - 1:
            self.scheduler.step()  # a completed run with a smaller `end` omitted this step

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.scheduler).__name__}, step {self._global_step})"


def all_schedulers(schedulers: list[Any] | dict[str, list[Any]] | None) -> list[Any]:
    """Return the schedulers of all optimizers as a flat list; `schedulers` is `Runner.param_schedulers`."""
    if isinstance(schedulers, dict):
        return [scheduler for part in schedulers.values() for scheduler in part]
    return schedulers or []


def build_param_scheduler(
    cfg: Any,
    optimizer: Any,
    *,
    epoch_length: int | None = None,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    max_updates: int | None = None,
) -> _ParamScheduler | TorchSchedulerAdapter:
    """Build a scheduler from its configuration, or adapt a scheduler object.

    A torch scheduler object is wrapped in a `TorchSchedulerAdapter`; other scheduler objects are returned unchanged.

    Args:
        cfg: a scheduler, or a dict whose `type` is one of this package's schedulers or a class in
            `torch.optim.lr_scheduler`. With `convert_to_iter_based=True`, `begin`, `end` and the other numbers of
            steps are specified in epochs and converted to iterations. `dict(scheduler=..., by_epoch=...)` wraps a
            torch scheduler object. Without `by_epoch`, torch schedulers step as the torch documentation recommends:
            `OneCycleLR` and `CyclicLR` after each iteration, and most others after each epoch.
        optimizer: a torch optimizer or an `OptimWrapper`.
        epoch_length: number of iterations in an epoch, for `convert_to_iter_based`.
        max_epochs: default `end` of epoch-based schedulers.
        max_iters: default `end` of iteration-based schedulers and, with `convert_to_iter_based`, of the others.
        max_updates: default `end` of schedulers with `interval="update"`, which step once per accumulation window. The
            intervals "epoch" and "batch" have the meaning of `by_epoch=True` and `by_epoch=False`.

    Raises:
        ConfigError: a key is invalid (the message names it), a scheduler object belongs to a different
            optimizer, or `by_epoch` is required but not set.
    """
    if isinstance(cfg, LRScheduler):
        cfg = {"scheduler": cfg}
    if not isinstance(cfg, Mapping):
        if not (hasattr(cfg, "step") and hasattr(cfg, "by_epoch")):
            raise ConfigError(f"must be a scheduler or a dict with a 'type', not {short_repr(cfg)}")
        _check_owner(getattr(cfg, "scheduler", cfg), optimizer)
        return cfg
    per_update = None
    if "interval" in cfg:
        cfg, per_update = _read_interval(cfg)
        max_iters = max_updates if per_update else max_iters
    kind = cfg.get("type")
    target: Any = PARAM_SCHEDULERS.resolve(kind) if isinstance(kind, str) else kind
    if isinstance(cfg.get("scheduler"), LRScheduler):
        made: _ParamScheduler | TorchSchedulerAdapter = _adapt(cfg, optimizer)
    elif inspect.isclass(target) and issubclass(target, LRScheduler):
        made = _build_torch(cfg, optimizer, (max_epochs, max_iters))
    else:
        made = _build_own(cfg, target, optimizer, epoch_length, (max_epochs, max_iters))
    if per_update is not None:
        made.per_update = per_update
    return made


def _build_own(
    cfg: Mapping[str, Any], target: Any, optimizer: Any, epoch_length: int | None, ends: _Ends
) -> _ParamScheduler:
    """Build one of this package's schedulers."""
    by_epoch = check(cfg.get("by_epoch", True), bool, "by_epoch")
    converts = check(cfg.get("convert_to_iter_based", False), bool, "convert_to_iter_based")
    end: Any = ends[0 if by_epoch else 1]
    if by_epoch and converts and epoch_length and ends[1] is not None:
        # The number of epochs, which is not an integer in an iteration-based run that ends in the middle of an epoch.
        epochs = Fraction(ends[1], epoch_length)
        end = epochs.numerator if epochs.denominator == 1 else epochs
    begin = cfg.get("begin")
    if cfg.get("end") is None and end is not None and is_number(begin) and begin >= end:
        raise ConfigError(
            f"is {begin}, but the run is only {float(end):g} long; train longer, reduce begin (and the `end` of the "
            "preceding scheduler), or set param_scheduler=null to train with a constant learning rate",
            "begin",
        )
    arguments = {key: value for key, value in cfg.items() if key != "convert_to_iter_based"}
    if converts and hasattr(target, "build_iter_from_epoch"):
        arguments |= {"type": target.build_iter_from_epoch, "epoch_length": epoch_length}
    defaults = {"optimizer": optimizer, "end": INF if end is None else end}
    built: _ParamScheduler = PARAM_SCHEDULERS.build(arguments, default_args=defaults)
    lengths = getattr(built, "_length_arguments", ())
    built.ends_with_run = bool(lengths) and all(cfg.get(name) is None for name in lengths)
    return built


def _read_interval(cfg: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the configuration with `by_epoch` in place of `interval`, and whether the interval is 'update'."""
    interval = check(cfg["interval"], Literal["epoch", "batch", "update"], "interval")
    by_epoch = interval == "epoch"
    if cfg.get("by_epoch", by_epoch) != by_epoch:
        raise ConfigError(f"'{interval}' contradicts by_epoch={cfg['by_epoch']}; remove by_epoch", "interval")
    rest = {key: value for key, value in cfg.items() if key != "interval"}
    return {**rest, "by_epoch": by_epoch}, interval == "update"


def _adapt(cfg: Mapping[str, Any], optimizer: Any) -> TorchSchedulerAdapter:
    """Return an adapter for the torch scheduler object in `dict(scheduler=..., by_epoch=..., end=...)`."""
    if other := sorted(set(cfg) - {"scheduler", "by_epoch", "end"}):
        raise ConfigError(
            f"'{other[0]}' cannot be changed for an existing scheduler; remove this key. The dict may only contain "
            "scheduler, by_epoch, interval and end"
        )
    _check_owner(cfg["scheduler"], optimizer)
    return _adapted(cfg["scheduler"], cfg, (None, None))


def _adapted(scheduler: Any, cfg: Mapping[str, Any], ends: _Ends) -> TorchSchedulerAdapter:
    """Return an adapter with the `by_epoch` and `end` of `cfg`; the default `end` is that of the run."""
    check(by_epoch := cfg.get("by_epoch"), bool | None, "by_epoch")
    check(end := cfg.get("end"), PositiveInt | None, "end")
    if by_epoch is None and not isinstance(scheduler, ReduceLROnPlateau):
        by_epoch = _counts_epochs(scheduler)
    return TorchSchedulerAdapter(scheduler, bool(by_epoch), end or ends[0 if by_epoch else 1] or INF)


def _check_owner(scheduler: Any, optimizer: Any) -> None:
    """Check that a scheduler object was created for the run's optimizer."""
    owner = getattr(scheduler, "optimizer", optimizer)
    if getattr(owner, "optimizer", owner) is not getattr(optimizer, "optimizer", optimizer):
        raise ConfigError(
            f"{type(scheduler).__name__} was created for a different optimizer, so it would not change the learning "
            "rates of this run; create it for the optimizer in optim_wrapper"
        )


def _build_torch(cfg: Mapping[str, Any], optimizer: Any, ends: _Ends) -> TorchSchedulerAdapter:
    """Build a torch scheduler."""
    for key in ("begin", "convert_to_iter_based"):
        if cfg.get(key):
            raise ConfigError(
                f"{cfg['type']} is a torch scheduler, which does not support {key}; remove {key} and specify the "
                "arguments in units of scheduler steps, or use a scheduler from slipstream.optim.scheduler"
            )
    own = {"by_epoch", "end", "begin", "convert_to_iter_based"}
    arguments = {key: value for key, value in cfg.items() if key not in own}
    torch_optimizer = getattr(optimizer, "optimizer", optimizer)
    scheduler = PARAM_SCHEDULERS.build(arguments, default_args={"optimizer": torch_optimizer})
    return _adapted(scheduler, cfg, ends)


# ---- torch's schedulers ----------------------------------------------------------------------------------

_STEP_PER_BATCH = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
_STEP_PER_EPOCH = (
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
)
# For each class, the argument that sets the length of the schedule; see `last_change`.
_LAST_CHANGE: Mapping[type, str] = {
    OneCycleParamScheduler: "total_steps",
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.StepLR: "step_size",
    lr_scheduler.ConstantLR: "total_iters",
    lr_scheduler.LinearLR: "total_iters",
    lr_scheduler.PolynomialLR: "total_iters",
    lr_scheduler.CosineAnnealingLR: "T_max",
}


def _counts_epochs(scheduler: LRScheduler) -> bool:
    """Return whether the torch documentation recommends calling the scheduler's `step` after each epoch.

    Raises:
        ConfigError: the documentation does not specify when to call `step`, so the user must set `by_epoch`.
    """
    units = _units(scheduler)
    if units in ({True}, {False}):
        return units == {True}
    raise ConfigError(
        f"{type(scheduler).__name__} can step after each epoch or after each iteration; set by_epoch to True or False. "
        "For a scheduler object, pass dict(scheduler=..., by_epoch=...)"
    )


def _units(scheduler: LRScheduler) -> set[bool | None]:
    """Return the set of `by_epoch` values of `scheduler`, or of the schedulers that it combines (None: unknown)."""
    if isinstance(scheduler, lr_scheduler.SequentialLR | lr_scheduler.ChainedScheduler):
        return {unit for part in scheduler._schedulers for unit in _units(part)}
    if isinstance(scheduler, _STEP_PER_BATCH):
        return {False}
    return {True} if isinstance(scheduler, _STEP_PER_EPOCH) else {None}


def last_change(scheduler: Any) -> tuple[str, int] | None:
    """Return the name and value of the argument that sets the schedule's length, or None if there is none.

    The length is the number of steps until the schedule is complete or first changes the learning rate.
    """
    name = next((name for kind, name in _LAST_CHANGE.items() if isinstance(scheduler, kind)), None)
    return None if name is None else (name, int(getattr(scheduler, name)))
