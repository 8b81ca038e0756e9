"""torch's own optimizers inside a compiled graph: their very step, on gradients and settings that are tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from slipstream.step.numerics import precise_dtype

__all__ = ["GraphUpdate", "can_trace", "is_hooked", "is_stateless", "plain_settings"]

_AS_TENSORS = ("lr", "betas")
"""Settings that torch's formulas take as tensors: a change of them recompiles nothing."""

_COUNTERS = ("state_steps", "mus", "etas")
"""State that torch keeps as one number for each parameter, by its names in `_init_group`."""

_OUTSIDE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""They branch on a count or on values; Muon's bfloat16 updates would be rounded by a learning rate that is a tensor."""


def can_trace(optimizer: Optimizer) -> bool:
    """Say whether the optimizer is one of torch's whose step `GraphUpdate` can run, and nothing is hooked into it."""
    kind = type(optimizer)
    torchs = kind.__module__.startswith("torch.optim") and hasattr(kind, "_init_group")
    return torchs and kind.__name__ not in _OUTSIDE and not is_hooked(optimizer) and _is_torchs(kind.step)


def is_stateless(optimizer: Optimizer) -> bool:
    """Return whether the optimizer keeps no state for any parameter."""
    return type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups)


def _is_torchs(function: Any) -> bool:
    """Return whether torch defines a function; its name and module may have been copied by `functools.wraps`."""
    return bool(inspect.unwrap(function).__globals__["__name__"].startswith("torch.optim"))


def is_hooked(optimizer: Optimizer) -> bool:
    """Say whether somebody wants to see, or has replaced, the optimizer's step; cheap."""
    own = vars(optimizer).get("step")  # learning rate schedulers wrap it to count calls
    return bool(
        getattr(
            optimizer, "_optimizer_step_pre_hooks", None
        )  # some libraries' optimizers skip torch's constructor
        or getattr(optimizer, "_optimizer_step_post_hooks", None)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or (own is not None and not _counts_calls(own, type(optimizer)))
    )


def _counts_calls(step: Any, kind: type[Optimizer]) -> bool:
    """Return whether `step` is the wrapper of a learning rate scheduler around the step of the class."""
    scheduler = getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler"
    return scheduler and getattr(step, "__wrapped__", None) is kind.step


class GraphUpdate:
    """One optimizer step as a function of gradients, which moves parameters and state in place.

    `torch.optim` writes every optimizer as a `step` that asks `_init_group` for lists of parameters, gradients and
    state, and hands them to a formula. Here that `step` runs on a stand-in for the optimizer, whose `_init_group` gives
    the graph's gradients and whose learning rates are 0-dim tensors: so the maths is torch's, for all of its
    optimizers, while schedules change settings without a new graph.

    Args:
        optimizer: a `torch.optim` optimizer (`can_trace`).
        params: those of its parameters that have a gradient; state is made for them.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self._step = _sgd if type(optimizer) is SGD else inspect.unwrap(type(optimizer).step)
        self._groups = [
            _Group(optimizer, sources, indices, params) for sources, indices in _alike(optimizer, params)
        ]
        self._values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))

    def __call__(self, grads: Sequence[Tensor]) -> None:
        """Move the parameters along `grads`, which are in the order of `params`."""
        view = _OptimizerView(self._groups, grads)
        self._step(view)
        view.write_back()

    def refresh(self) -> str | None:
        """Write changed learning rates, betas and momenta into the tensors that the graph reads, without waiting.

        Returns:
            What else has changed, so that the graph no longer fits, or None.
        """
        for group in self._groups:
            if (changed := group.refresh()) is not None:
                return changed
        return None

    def keeps_state(self) -> bool:
        """Say whether the optimizer still has the very state tensors that the graph changes."""
        values = list(chain.from_iterable(map(dict.values, self.optimizer.state.values())))
        return len(values) == len(self._values) and all(map(is_, values, self._values))

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that a step reads, apart from parameters and gradients."""
        yield from self.state
        yield from (group.numbers for group in self._groups)

    @property
    def state(self) -> list[Tensor]:
        """Every tensor that a step changes, apart from the parameters."""
        return [tensor for group in self._groups for values in group.state for tensor in values]


class _Group:
    """Parameter groups with equal settings, as one: their tensors, and the settings as the graph reads them."""

    def __init__(
        self,
        optimizer: Optimizer,
        sources: list[dict[str, Any]],
        indices: list[int],
        params: Sequence[Tensor],
    ) -> None:
        self.sources = sources
        self.indices = indices
        self.params = [params[i] for i in indices]
        device = self.params[0].device
        if device.type != "cpu" and "capturable" in sources[0]:
            _count_on(optimizer, sources, self.params, device)
        names, self.flag, self.state = _make_state(optimizer, sources[0], self.params)
        # float64 where there is one: of 1 - beta2 ** step, float32 keeps but four digits. Eager optimizers compute it
        # with Python's numbers, which are float64.
        dtype = precise_dtype(device)
        self.counts_in = dtype
        self.counters = [name in _COUNTERS for name in names]
        own = sources[0]
        self.given = {name: own[name] for name in _as_tensors(optimizer, own)}
        # How many numbers a setting has, 0 if it is no pair: on their values a graph must not depend.
        self.layout = [(n, len(v) if isinstance(v, tuple | list) else 0) for n, v in self.given.items()]
        numbers = [_tensor(v).to(device, dtype) for value in self.given.values() for v in _as_list(value)]
        # One tensor for all, with a dimension: of a 0-dim float64 tensor torch takes the value for a Python number.
        self.numbers = torch.stack(numbers) if numbers else torch.empty(0)
        plain = {name: own[name] for name in _AS_TENSORS if name in own} | plain_settings(optimizer, own)
        self.fixed = {name: value for name, value in plain.items() if name not in self.given}
        self.fixed.pop("capturable", None)
        self.on_device = device.type != "cpu"
        self.counts = "capturable" in own

    def refresh(self) -> str | None:
        first = self.sources[0]
        place = 0
        if "momentum" in self.given and not first["momentum"]:
            return "momentum"  # torch then neither reads nor writes the momentum buffers
        for name in self.given:
            value = first[name]
            numbers = _as_list(value)
            if not all(_same({name: value}, {name: source[name]}) for source in self.sources[1:]):
                return f"{name} of groups that had the same"
            if holds_tensors(value):  # a schedule may have changed them in place
                for index, number in enumerate(numbers, place):
                    self.numbers[index].copy_(_tensor(number), non_blocking=True)
            elif value != self.given[name]:
                for index, number in enumerate(numbers, place):
                    self.numbers[index] = number
                self.given[name] = value
            place += len(numbers)
        for source in self.sources:
            for name in self.fixed:
                if source[name] != self.fixed[name]:
                    return name
        return None

    def settings(self, number: int) -> dict[str, Any]:
        """Return the group as a `step` reads it."""
        left = iter(self.numbers.unbind(0))
        tensors = {
            name: tuple(next(left) for _ in range(count)) if count else next(left)
            for name, count in self.layout
        }
        # Inductor joins the tensors of a foreach operation into few kernels, and, of torch 2.13, loses the alpha of a
        # plain add to a matrix product. Uncompiled, torch takes learning rates as tensors without foreach alone.
        joined = self.on_device or torch.compiler.is_compiling()
        words = {"foreach": joined, "fused": False, "params": self.params, "number": number}
        if self.counts:
            words["capturable"] = joined  # formulas without a branch on a step count
        return {**self.fixed, **tensors, **words}


class _OptimizerView:
    """What an optimizer's `step` gets as `self`: the tensors of the graph."""

    def __init__(self, groups: list[_Group], grads: Sequence[Tensor]) -> None:
        self.groups = groups
        self.grads = grads
        self.state = _Scratch()
        self.param_groups = [group.settings(number) for number, group in enumerate(groups)]
        self.precise: list[tuple[list[Tensor], list[Tensor]]] = []

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        own = self.groups[group["number"]]
        lists[0].extend(own.params)
        lists[1].extend(self.grads[i] for i in own.indices)
        for target, values, counter in zip(lists[2:], own.state, own.counters, strict=True):
            given = [value.to(own.counts_in) for value in values] if counter else values
            target.extend(given)
            if counter:
                self.precise.append((values, given))
        return own.flag

    def write_back(self) -> None:
        """Round the counters into the optimizer's state."""
        for values, precise in self.precise:
            torch._foreach_copy_(values, precise)

    def _cuda_graph_capture_health_check(self) -> None:
        """Disable torch's capture check."""

    _accelerator_graph_capture_health_check = _cuda_graph_capture_health_check


def _sgd(optimizer: _OptimizerView) -> None:
    """Step as `torch.optim.SGD` does after its first step, which makes the momenta.

    torch's version branches on `momentum == 0`, which fails for a tensor.
    """
    for group in optimizer.param_groups:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        momenta: list[Tensor] = []
        optimizer._init_group(group, params, grads, momenta)
        steps = [-grad for grad in grads] if group["maximize"] else grads
        if group["weight_decay"]:
            steps = list(torch._foreach_add(steps, torch._foreach_mul(params, group["weight_decay"])))
        if momenta:
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps, alpha=1 - group["dampening"])
            ahead = torch._foreach_mul(momenta, group["momentum"]) if group["nesterov"] else None
            steps = momenta if ahead is None else list(torch._foreach_add(steps, ahead))
        torch._foreach_sub_(params, torch._foreach_mul(steps, group["lr"]))


class _Scratch:
    """Takes what a `step` writes into `self.state[param]`: the very tensors that it has changed in place."""

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return {}


def _alike(optimizer: Optimizer, params: Sequence[Tensor]) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return groups with equal settings together, with the indices of their `params`."""
    index = {param: i for i, param in enumerate(params)}
    found: list[tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = []
    for group in optimizer.param_groups:
        indices = [index[p] for p in group["params"] if p in index]
        if not indices:
            continue
        settings = plain_settings(optimizer, group) | {name: group.get(name) for name in _AS_TENSORS}
        # Of one device and dtype, as torch's formulas want them.
        settings["kind"] = (params[indices[0]].device, params[indices[0]].dtype)
        for known, sources, members in found:
            if _same(known, settings):
                sources.append(group)
                members.extend(indices)
                break
        else:
            found.append((settings, [group], indices))
    return [(sources, members) for _, sources, members in found]


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say whether settings are equal; a tensor is equal to itself alone, since its value is on the device."""
    return one.keys() == other.keys() and all(
        one[name] is other[name]
        or (not holds_tensors(one[name]) and not holds_tensors(other[name]) and one[name] == other[name])
        for name in one
    )


def plain_settings(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return what the formulas read as plain values; what schedules write into a group besides is not among them."""
    left_out = {"foreach", "fused", *_AS_TENSORS}
    return {
        name: value for name, value in group.items() if name in optimizer.defaults and name not in left_out
    }


def _count_on(optimizer: Optimizer, sources: list[dict[str, Any]], params: list[Tensor], device: Any) -> None:
    """Let step counts live on the device, where the graph can read them."""
    for source in sources:
        source["capturable"] = True
    for param in params:
        if isinstance(step := optimizer.state[param].get("step"), Tensor):
            optimizer.state[param]["step"] = step.to(device)


def _make_state(
    optimizer: Optimizer, group: dict[str, Any], params: list[Tensor]
) -> tuple[list[str], Any, list[list[Tensor]]]:
    """Let the optimizer make its state; return the names of its lists, what `_init_group` says, and the lists."""
    kept = [param.grad for param in params]
    for param in params:  # it passes over parameters without a gradient
        param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
    try:
        names = list(inspect.signature(type(optimizer)._init_group).parameters)[2:]  # type: ignore[attr-defined]
        lists: list[list[Any]] = [[] for _ in names]
        flag = type(optimizer)._init_group(optimizer, {**group, "params": params}, *lists)  # type: ignore[attr-defined]
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad
    state = lists[2:]
    for values in state:
        for i, value in enumerate(values):
            if value is None:  # SGD makes its momenta in its first step
                values[i] = optimizer.state[params[i]]["momentum_buffer"] = torch.zeros_like(params[i])
    return names[2:], flag, state


def _as_tensors(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Return which settings of a group the formulas take as tensors."""
    kind = type(optimizer).__name__
    names = [
        name for name in _AS_TENSORS if name in group and not (name == "betas" and kind in ("NAdam", "RAdam"))
    ]
    return [*names, "momentum"] if type(optimizer) is SGD and group["momentum"] else names


def holds_tensors(value: Any) -> bool:
    """Say whether a setting is a tensor, or a pair of them."""
    return any(isinstance(number, Tensor) for number in _as_list(value))


def _tensor(number: Any) -> Tensor:
    return (
        number.detach().reshape(())
        if isinstance(number, Tensor)
        else torch.tensor(number, dtype=torch.float64)
    )


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
