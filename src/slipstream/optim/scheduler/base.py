"""Base class for all schedulers, which implements active steps, chaining and resuming."""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Self

from slipstream.errors import CheckpointError, ConfigError
from slipstream.logging import print_log
from slipstream.optim.scheduler.attributes import own_attributes, restored_attributes, same
from slipstream.optim.scheduler.checks import INF, check_int, is_number, require
from slipstream.optim.scheduler.values import ParamValues
from slipstream.typecheck import matches

__all__ = ["_ParamScheduler"]


class _RemembersAttributes(ABCMeta):
    """Metaclass that records the initial attributes of each scheduler after its constructor has run."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        scheduler = super().__call__(*args, **kwargs)
        scheduler._initial = own_attributes(scheduler, scheduler._saved_elsewhere)
        return scheduler

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without this property, `inspect` would show the parameters of `__call__`.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class _ParamScheduler(metaclass=_RemembersAttributes):
    """Base class for schedulers that change one option of the parameter groups.

    A scheduler is active during the steps `begin <= step < end`, counted in epochs or iterations. In other steps, the
    value does not change. A scheduler computes each value from the current value, so schedulers for the same option
    can be chained (a warm-up, then a decay) or combined (their factors are multiplied).

    A subclass defines `_next(value, base)` for one group, or `_get_value()` for all groups. In these methods,
    `self.last_step` is the number of steps since `begin`. The constructor calls `step()` once.

    The state contains the subclass attributes that have changed since the scheduler was built, if they are tensors,
    numbers or strings, or lists, tuples, sets, deques or dicts of these types. (Sets and deques inside another
    container are not supported.) Attributes that still have their initial values are not part of the state, so a
    resumed run can change them. Attributes of other types are not saved.

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
    # Arguments that each determine the length of the schedule.
    _length_arguments: ClassVar[tuple[str, ...]] = ()
    # Arguments that `build_iter_from_epoch` converts from epochs to iterations.
    _step_arguments: ClassVar[tuple[str, ...]] = ()
    _state_keys: ClassVar[tuple[str, ...]] = ("last_step", "_global_step", "base_values", "_last_value")

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
        require(matches(end, int) and end > begin, "end", f"an int greater than begin={begin}", end)
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
        end: float = INF,
        by_epoch: bool = True,
        epoch_length: int | None = None,
        **kwargs: Any,
    ) -> Self:
        """Convert arguments from epochs to iterations, and build a scheduler that steps after each iteration.

        An epoch has `epoch_length` iterations.

        Raises:
            ConfigError: `epoch_length` is not a positive int, or the arguments are already in iterations.
        """
        require(by_epoch is True, "by_epoch", "True to convert epochs to iterations", by_epoch)
        check_int("epoch_length", epoch_length, 1)
        assert epoch_length is not None

        def convert(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [convert(v) for v in value]
            return int(value * epoch_length) if is_number(value) else value

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
            self.last_step += 1
            self._write([float(value) for value in self._get_value()])
        self._last_value = self._values.read()

    def get_last_value(self) -> list[float]:
        """Return the value of every parameter group as of the last step, without synchronizing with the device."""
        return list(self._last_value)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's progress as numbers and lists, without its arguments.

        The `attributes` key contains any other attributes that have changed.
        """
        state = {key: getattr(self, key) for key in self._state_keys}
        state = {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
        own = own_attributes(self, self._saved_elsewhere)
        changed = {
            name: list(value) if isinstance(value, deque) else value
            for name, value in own.items()
            if name not in self._initial or not same(value, self._initial[name])
        }
        return {**state, "attributes": changed} if changed else state

    @property
    def _saved_elsewhere(self) -> frozenset[str]:
        return frozenset({*self._state_keys, "optimizer", "_values", "_initial", "ends_with_run"})

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
                f"the state of {name} has {saved} parameter group{'' if saved == 1 else 's'}, but the optimizer has "
                f"{len(self._values.groups)}; check that paramwise_cfg has not changed"
            )
        for key in self._state_keys:
            value = state_dict[key]
            setattr(self, key, list(value) if isinstance(value, list) else value)
        self._values.restore(self._last_value)
        attributes = self.check_attributes(state_dict)
        for name in own_attributes(self, self._saved_elsewhere):
            if name not in attributes:  # created in a step after the checkpoint was saved
                delattr(self, name)
        vars(self).update(attributes)
        if not self.need_val_args:
            self._catch_up()

    def _catch_up(self) -> None:
        """Perform the step that a completed run omitted.

        If the configuration does not set `end`, it is the length of the run, and no step is performed after the last
        epoch. If the run is then resumed with more epochs, `end` is larger, and the omitted step must be performed.
        """
        due = min(self._global_step, self.end - 1) + self._offset
        if self.begin <= self._global_step and self.last_step == due - 1:
            self.last_step += 1
            self._write([float(value) for value in self._get_value()])
            self._last_value = self._values.read()

    def check_attributes(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes to restore from a state; attributes that were not saved have their initial values.

        Raises:
            CheckpointError: the state contains an invalid name or value.
        """
        saved = restored_attributes(self, state_dict.get("attributes", {}), self._saved_elsewhere)
        return {**copy.deepcopy(self._initial), **saved}

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
