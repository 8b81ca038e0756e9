"""Base class for all schedulers, which implements active steps, chaining and resuming."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError, did_you_mean
from slipstream.logging import print_log
from slipstream.typecheck import Rule, check, is_number

INF = int(1e9)


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raise a `ConfigError` unless `value` is an int of at least `minimum`."""
    check(value, Annotated[int, Rule(lambda number: number >= minimum, f"of at least {minimum}")], name)


class _SchedulerType(ABCMeta):
    """Metaclass that records the initial attributes of each scheduler after its constructor has run."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().__call__(*args, **kwargs)
        scheduler._initial = scheduler._own_attributes()
        return scheduler

    @property
    def __signature__(cls) -> inspect.Signature:
        """The constructor's parameters, including those of the base class that it accepts as `**kwargs`."""
        parameters: dict[str, inspect.Parameter] = {}
        for base in cls.__mro__:
            if "__init__" in vars(base):
                own = inspect.signature(base.__init__).parameters  # type: ignore[misc]
                parameters = {**parameters, **{k: p for k, p in own.items() if k not in parameters}}
                if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values()):
                    break
        hidden = {"self", *(() if "param_name" not in cls._hidden else ("param_name",))}  # type: ignore[attr-defined]
        shown = [p for name, p in parameters.items() if name not in hidden]
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        by_name = inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature([p.replace(kind=by_name) for p in shown if p.kind not in variable])


class _ParamScheduler(metaclass=_SchedulerType):
    """Base class for schedulers that change one option of the parameter groups.

    A scheduler is active during the steps `begin <= step < end`, counted in epochs or iterations. In other steps, the
    value does not change. A scheduler computes each value from the current value, so schedulers for the same option
    can be chained (a warm-up, then a decay) or combined (their factors are multiplied).

    A subclass defines `_next(value, base)` for one group, or `_get_value()` for all groups. In these methods,
    `self.last_step` is the number of steps since `begin`. The constructor calls `step()` once.

    The state contains the subclass attributes that have changed since the scheduler was built, if they consist of
    numbers, strings, lists, tuples and dicts. Attributes that still have their initial values are not part of the
    state, so a resumed run can change them.

    Args:
        optimizer: a torch optimizer, an `OptimWrapper`, or any other object with `param_groups`.
        param_name: name of the option. Its value is a number or a 0-dim tensor. Tensors are updated in place.
        begin: first active step.
        end: first step after the active steps.
        last_step: the last completed step, for resuming without a state; -1 starts from the beginning.
        by_epoch: whether the caller calls `step` after each epoch; otherwise, `step` is called after each iteration.
        verbose: whether to log each value.

    Raises:
        ConfigError: an argument is invalid; the message names it.
    """

    # Whether `step` must also be called with the results of each validation run.
    need_val_args: ClassVar[bool] = False
    # Whether the length of the schedule is the length of the run, because no argument sets it.
    ends_with_run = False
    # Whether the scheduler steps once per accumulation window; None if the user has not specified it.
    per_update: bool | None = None
    # Arguments that each determine the length of the schedule.
    _length_arguments: ClassVar[tuple[str, ...]] = ()
    # Arguments that `build_iter_from_epoch` converts from epochs to iterations.
    _step_arguments: ClassVar[tuple[str, ...]] = ()
    _state_keys: ClassVar[tuple[str, ...]] = ("last_step", "_global_step", "base_values", "_last_value")
    _hidden: ClassVar[tuple[str, ...]] = ()  # parameters that a mixin sets

    _initial: dict[str, Any]  # the attributes after construction

    def __init__(
        self,
        optimizer: Any,
        param_name: str = "lr",
        begin: int = 0,
        end: int = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        check_int("begin", begin, 0)
        check_int("last_step", last_step, -1)
        check_int("end", end, begin + 1)
        self.optimizer = optimizer
        self.param_name = param_name
        self.begin = begin
        self.end = end
        self.by_epoch = by_epoch
        self.verbose = verbose
        self.last_step = last_step
        self._offset = last_step + 1 - begin
        self._global_step = -1
        self._values = self._make_values()
        self.base_values = self._values.initial(resumed=last_step != -1)
        self._last_value = self._values.read()
        self.step()

    @classmethod
    def build_iter_from_epoch(
        cls,
        *args: Any,
        begin: float = 0,
        end: float | Fraction = INF,
        by_epoch: bool = True,
        epoch_length: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Convert arguments from epochs to iterations, and build a scheduler that steps after each iteration.

        An epoch has `epoch_length` iterations.

        Raises:
            ConfigError: `epoch_length` is not a positive int, or the arguments are already in iterations.
        """
        check(by_epoch, Literal[True], "by_epoch")
        check_int("epoch_length", epoch_length, 1)
        assert epoch_length is not None

        def convert(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [convert(v) for v in value]
            return int(value * epoch_length) if is_number(value) or isinstance(value, Fraction) else value

        kwargs.update({name: convert(kwargs[name]) for name in cls._step_arguments if name in kwargs})
        kwargs |= {"begin": convert(begin), "end": INF if end == INF else convert(end), "by_epoch": False}
        return cls(*args, **kwargs)

    @cached_property
    def total_iters(self) -> int:
        """Value of `last_step` at the last active step."""
        return self.end - self.begin - 1

    def step(self) -> None:
        """Advance by one step, and set the next value if the scheduler is active in this step."""
        self._global_step += 1
        if len(self.base_values) != len(self._values.groups):
            raise ConfigError(
                f"the optimizer has {len(self._values.groups)} parameter groups, but had "
                f"{len(self.base_values)} when {type(self).__name__} was built; add groups before building schedulers"
            )
        if self.begin <= self._global_step < self.end:
            self._advance()
        self._last_value = self._values.read()

    def _advance(self) -> None:
        self.last_step += 1
        self._write([float(value) for value in self._get_value()])

    def get_last_value(self) -> list[float]:
        """Return the value of every parameter group as of the last step, without synchronizing with the device."""
        return list(self._last_value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's progress as numbers and lists, without its arguments.

        The `attributes` key contains any other attributes that have changed.
        """
        state = {key: copy.copy(getattr(self, key)) for key in self._state_keys}
        missing = object()
        own = self._own_attributes().items()
        changed = {name: value for name, value in own if self._initial.get(name, missing) != value}
        return {**state, "attributes": changed} if changed else state

    def _own_attributes(self) -> dict[str, Any]:
        """Return copies of the attributes of subclasses that can be stored in a checkpoint."""
        others = (*self._state_keys, "optimizer", "_values", "_initial", "ends_with_run", "per_update")
        return {
            name: copy.deepcopy(value)
            for name, value in vars(self).items()
            if name not in others and not isinstance(getattr(type(self), name, None), cached_property)
            if _is_plain(value)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict()`; the next values equal those of an uninterrupted run.

        Load the optimizer state first, because it contains the current values. Unknown keys are ignored.

        Raises:
            CheckpointError: the state belongs to a different scheduler, or has a different number of groups.
        """
        name = type(self).__name__
        missing = [key for key in self._state_keys if key not in state_dict]
        if missing:
            raise CheckpointError(
                f"the state does not contain the keys {missing}, so it was not saved by {name}; load the state of a "
                "scheduler of the same class"
            )
        if (saved := len(state_dict["base_values"])) != len(self._values.groups):
            raise CheckpointError(
                f"the state of {name} has {saved} parameter groups, but the optimizer has {len(self._values.groups)}; "
                "check that paramwise_cfg has not changed"
            )
        vars(self).update({key: copy.copy(state_dict[key]) for key in self._state_keys})
        self._values.restore(self._last_value)
        for name in self._own_attributes().keys() - self._initial.keys():
            delattr(self, name)  # created in a step after the checkpoint was saved
        vars(self).update(copy.deepcopy({**self._initial, **state_dict.get("attributes", {})}))
        # No step is performed after the last epoch of a run. If the run is then resumed with more epochs, `end` is
        # larger, and the omitted step must be performed.
        due = min(self._global_step, self.end - 1) + self._offset
        if not self.need_val_args and self.begin <= self._global_step and self.last_step == due - 1:
            self._advance()
            self._last_value = self._values.read()

    def __repr__(self) -> str:
        unit = "epochs" if self.by_epoch else "iterations"
        end = "" if self.end == INF else self.end
        return (
            f"{type(self).__name__}({self.param_name}, {unit} {self.begin}..{end}, step {self._global_step})"
        )

    def _get_value(self) -> list[float]:
        return [self._next(v, base) for v, base in zip(self._values.read(), self.base_values, strict=True)]

    def _next(self, value: float, base: float) -> float:
        """Return the value at `self.last_step`, computed from the current value and the initial value."""
        raise NotImplementedError(f"{type(self).__name__} must define _next(value, base) or _get_value()")

    def _make_values(self) -> ParamValues:
        return ParamValues(self.optimizer, self.param_name)

    def _write(self, values: list[float]) -> None:
        self._values.write(values)
        if self.verbose:
            unit = "epoch" if self.by_epoch else "iteration"
            text = ", ".join(f"{value:.4e}" for value in values)
            print_log(f"{self.param_name} at {unit} {self._global_step}: {text}", "current")


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, int | float | str)


class LRSchedulerMixin:
    """Mixin for learning rate schedulers, which have no `param_name` argument.

    In the list of base classes, this mixin must precede the `...ParamScheduler` class.
    """

    _hidden: ClassVar[tuple[str, ...]] = ("param_name",)

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, "lr", *args, **kwargs)  # type: ignore[call-arg]


class MomentumSchedulerMixin:
    """Mixin for schedulers of `momentum` or Adam's first beta.

    In the list of base classes, this mixin must precede the `...ParamScheduler` class.

    Raises:
        ConfigError: the optimizer has neither momentum nor betas.
    """

    _hidden: ClassVar[tuple[str, ...]] = ("param_name",)

    def __init__(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(optimizer, "param_groups", [])
        # Check betas first, because a momentum scheduler adds a copy of the first beta to Adam's groups as `momentum`.
        self.use_betas = all("betas" in group for group in groups)
        if not self.use_betas and not all("momentum" in group for group in groups):
            name = type(getattr(optimizer, "optimizer", optimizer)).__name__
            raise ConfigError(f"{name} has neither momentum nor betas; remove the momentum scheduler")
        super().__init__(optimizer, "momentum", *args, **kwargs)  # type: ignore[call-arg]

    def _make_values(self) -> ParamValues:
        optimizer: Any = self.optimizer  # type: ignore[attr-defined]
        return BetaValues(optimizer) if self.use_betas else ParamValues(optimizer, "momentum")


class ParamValues:
    """One option (`lr`, `momentum`, `weight_decay`) of an optimizer's parameter groups, as floats.

    The option may be a 0-dim tensor, so that a compiled step is not recompiled when the value changes. The tensor is
    updated in place, and its value is cached on the host. Reading the option synchronizes with the device only the
    first time, and after other code has changed the tensor. The cache is an attribute of the optimizer, so all of the
    optimizer's schedulers share it.

    Args:
        optimizer: an object with `param_groups`; for an `OptimWrapper`, the cache is stored on its inner optimizer.
        name: key of the option.

    Raises:
        ConfigError: a group does not have the option.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        if not getattr(optimizer, "param_groups", None):
            raise ConfigError(f"optimizer must have param_groups, but {type(optimizer).__name__} has none")
        self.optimizer = optimizer
        self.name = name
        owner = getattr(optimizer, "optimizer", optimizer)
        # Each entry keeps its tensor alive, so that no other tensor can have the same id.
        self._cache: dict[int, tuple[Tensor, int, float]] = vars(owner).setdefault("_values_on_host", {})
        for index, group in enumerate(self.groups):
            if name not in group:
                options = sorted(key for key in group if key != "params")
                raise ConfigError(
                    f"param_groups[{index}] has no option '{name}' (param_name); its options are {options}"
                    f"{did_you_mean(name, options)}"
                )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's current parameter groups."""
        return self.optimizer.param_groups

    def read(self) -> list[float]:
        """Return the value of every group."""
        return [self._float(self._get(group)) for group in self.groups]

    def write(self, values: Sequence[float]) -> None:
        """Set the value of every group."""
        for group, value in zip(self.groups, values, strict=True):
            current = self._get(group)
            if not isinstance(current, Tensor):
                self._set(group, value)
            elif self._float(current) != value:
                current.fill_(value)
                self._store(current, value)

    def restore(self, values: Sequence[float]) -> None:
        """Cache each value for its tensor if the value, rounded to the tensor's dtype, equals the tensor.

        Without the cached value, a resumed run would continue from a learning rate that has been rounded to float32.
        """
        for group, value in zip(self.groups, values, strict=True):
            current = self._get(group)
            if isinstance(current, Tensor) and torch.tensor(value, dtype=current.dtype) == current.cpu():
                self._store(current, value)

    def initial(self, resumed: bool) -> list[float]:
        """Return the initial value of every group, and store the value in groups that do not contain it yet.

        Raises:
            ConfigError: `resumed` is True, but a group does not contain its initial value.
        """
        key = f"initial_{self.name}"
        for index, (group, value) in enumerate(zip(self.groups, self.read(), strict=True)):
            if resumed and key not in group:
                raise ConfigError(
                    f"last_step is set to resume a run, but param_groups[{index}] has no '{key}'; "
                    "load the optimizer state first, or set last_step to -1"
                )
            group.setdefault(key, value)
        return [float(group[key]) for group in self.groups]

    def _get(self, group: dict[str, Any]) -> Any:
        return group[self.name]

    def _set(self, group: dict[str, Any], value: float) -> None:
        group[self.name] = value

    def _store(self, tensor: Tensor, value: float) -> None:
        self._cache[id(tensor)] = (tensor, tensor._version, value)

    def _float(self, value: Any) -> float:
        if not isinstance(value, Tensor):
            return float(value)
        cached = self._cache.get(id(value))
        if cached is None or cached[1] != value._version:
            self._store(value, value.item())
            cached = self._cache[id(value)]
        return cached[2]


class BetaValues(ParamValues):
    """The first beta of Adam optimizers, which is also stored in the parameter groups as `momentum`."""

    def __init__(self, optimizer: Any) -> None:
        for group in getattr(optimizer, "param_groups", []):
            group.setdefault("momentum", 0.0)
        super().__init__(optimizer, "momentum")
        self._mirror()

    def write(self, values: Sequence[float]) -> None:
        """Set the first beta of every group."""
        super().write(values)
        self._mirror()

    def _get(self, group: dict[str, Any]) -> Any:
        return group["betas"][0]

    def _set(self, group: dict[str, Any], value: float) -> None:
        group["betas"] = (value, *group["betas"][1:])

    def _mirror(self) -> None:
        for group, value in zip(self.groups, self.read(), strict=True):
            group["momentum"] = value
