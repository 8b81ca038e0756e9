"""`GraphUpdate`: run the `step` of torch's optimizers in a graph, with gradients and settings as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from slipstream.step.numerics import precise_dtype

__all__ = ["GraphUpdate", "can_trace", "has_state", "infer_trained", "is_hooked"]

_TENSOR_SETTINGS = ("lr", "betas")
"""Settings that torch's optimizers accept as tensors; changing them does not recompile the graph."""

_COUNTERS = ("state_steps", "mus", "etas")
"""Names that `_init_group` uses for state that consists of one number per parameter."""

_UNSUPPORTED = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers that branch on tensor values, and Muon, whose bfloat16 updates lose precision if `lr` is a tensor."""


def can_trace(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is of a supported class, and its `step` has no hooks and was not replaced."""
    kind = type(optimizer)
    from_torch = kind.__module__.startswith("torch.optim") and hasattr(kind, "_init_group")
    supported = from_torch and kind.__name__ not in _UNSUPPORTED
    return supported and not is_hooked(optimizer) and _is_defined_by_torch(kind.step)


def has_state(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    """Return whether an update has created the optimizer's state for all of these parameters, if it has any."""
    stateless = _stateless(optimizer)
    return all(
        id(param) in stateless or any(value is not None for value in optimizer.state.get(param, {}).values())
        for param in params
    )


def infer_trained(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that a run has trained, or [] if a stateful optimizer has not taken a step yet.

    These are the trainable parameters that have optimizer state, and those for which the optimizer has none.
    """
    stateless = _stateless(optimizer)
    trainable = [param for param in params if param.requires_grad]
    return [param for param in trainable if param in optimizer.state or id(param) in stateless]


def _stateless(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters for which the optimizer has no state: those of SGD without momentum."""
    groups = optimizer.param_groups if type(optimizer) is SGD else []
    return {id(param) for group in groups if not group["momentum"] for param in group["params"]}


def _is_defined_by_torch(function: Any) -> bool:
    """Return whether torch defines a function and all of its wrappers (a wrapper's `__module__` is unreliable)."""
    while function.__globals__["__name__"].startswith("torch."):
        if not hasattr(function, "__wrapped__"):
            return True
        function = function.__wrapped__
    return False


def is_hooked(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's step has hooks or was replaced. This check is fast enough to run at each step."""
    own = vars(optimizer).get("step")  # learning rate schedulers wrap it to count calls
    # The attributes are missing if a subclass does not call torch's constructor.
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", None)
        or getattr(optimizer, "_optimizer_step_post_hooks", None)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or (own is not None and not _counts_calls(own, type(optimizer)))
    )


def _counts_calls(step: Any, kind: type[Optimizer]) -> bool:
    """Return whether `step` is a learning rate scheduler's wrapper around the `step` of the class."""
    scheduler = getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler"
    return scheduler and getattr(step, "__wrapped__", None) is kind.step


class GraphUpdate:
    """One optimizer step as a function of the gradients, with in-place updates of parameters and state.

    In `torch.optim`, each `step` method collects lists of parameters, gradients and state through `_init_group`, and
    passes them to a function. This class calls that method (for SGD, `_sgd`) with a proxy as `self`, whose
    `_init_group` returns the graph's gradients, and whose learning rates are 0-dim tensors. Except for SGD, the update
    therefore runs torch's own code. Schedulers can change learning rates without a new graph.

    Args:
        optimizer: a `torch.optim` optimizer for which `can_trace` returns True.
        params: the optimizer's parameters that receive a gradient; an earlier update has created their state.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self._step = _sgd if type(optimizer) is SGD else inspect.unwrap(type(optimizer).step)
        self._groups = [
            _Group(optimizer, sources, indices, params)
            for sources, indices in _group_by_settings(optimizer, params)
        ]
        self._values = list(chain.from_iterable(map(dict.values, optimizer.state.values())))

    def __call__(self, params: Sequence[Tensor], grads: Sequence[Tensor], finite: Tensor | None) -> None:
        """Update the parameters with `grads`, which must be in the order of `params`, even if `finite` is false."""
        view = _OptimizerView(self._groups, grads)
        self._step(view)
        view.write_back()

    def find_change(self) -> str | None:
        """Write changed learning rates, betas and momenta into the graph's tensors, without waiting for the device.

        Returns:
            The setting or state that invalidates the graph, or None if the graph is still valid.
        """
        for group in self._groups:
            if (changed := group.find_change()) is not None:
                return changed
        values = list(chain.from_iterable(map(dict.values, self.optimizer.state.values())))
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return None if same else "the optimizer's state"

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that an optimizer step reads, except parameters and gradients."""
        yield from self.state
        yield from (group.numbers for group in self._groups)

    @property
    def state(self) -> list[Tensor]:
        """All tensors that an optimizer step changes, except the parameters."""
        return [tensor for group in self._groups for values in group.state for tensor in values]


class _Group:
    """Parameter groups with identical settings, merged into one; some of its settings, such as `lr`, are tensors."""

    def __init__(
        self,
        optimizer: Optimizer,
        sources: list[dict[str, Any]],
        indices: list[int],
        params: Sequence[Tensor],
    ) -> None:
        self.sources, self.indices, self.params = sources, indices, [params[i] for i in indices]
        own, device = sources[0], self.params[0].device
        self.on_device, self.has_capturable = device.type != "cpu", "capturable" in own
        if self.on_device and self.has_capturable:
            _move_counts(optimizer, sources, self.params, device)
        names, self.flag, self.state = _read_state(optimizer, own, self.params)
        # Use float64 if possible: in float32, 1 - beta2 ** step has only four correct digits. Eager optimizers use
        # Python floats, which are float64.
        self.count_dtype = precise_dtype(device)
        self.counters = [name in _COUNTERS for name in names]
        positions = count()
        self.positions = {
            name: [next(positions) for _ in _as_list(own[name])]
            for name in _settings_as_tensors(optimizer, own)
        }
        """The indices in `numbers` of each setting that is a tensor in the graph."""
        # Use one 1-dim tensor for all numbers, because Dynamo treats 0-dim float64 CPU tensors as Python numbers.
        self.numbers = torch.zeros(next(positions), dtype=self.count_dtype, device=device)
        self.written: dict[str, Any] = {}
        """The values in `numbers`, by setting; None for a setting that is or contains a tensor."""
        for name in self.positions:
            self._write(name, own[name])
        self.fixed = {
            name: _copy_list(value)
            for name, value in _settings(optimizer, own).items()
            if name not in self.positions and name != "capturable"
        }

    def find_change(self) -> str | None:
        first = self.sources[0]
        for name, written in self.written.items():
            value = first[name]
            if type(value) is type(written) and value == written:
                same = [source[name] for source in self.sources] == [written] * len(self.sources)
            else:
                self._write(name, value)
                same = all(_is_same(value, source[name]) for source in self.sources[1:])
            if not same:
                return f"{name} in some parameter groups that had identical settings"
        if "momentum" in self.positions and not first["momentum"]:
            return "momentum"  # if the momentum is 0, torch does not use the momentum buffers
        for source in self.sources:
            for name, fixed in self.fixed.items():
                if source[name] != fixed:
                    return name
        return None

    def _write(self, name: str, value: Any) -> None:
        """Write a changed setting into `numbers`, without waiting for the device."""
        for index, number in zip(self.positions[name], _as_list(value), strict=True):
            if isinstance(number, Tensor):
                self.numbers[index].copy_(number.detach().reshape(()), non_blocking=True)
            else:
                self.numbers[index].fill_(number)
        # A scheduler may change tensors in place, so they are written in each step.
        self.written[name] = None if _holds_tensors(value) else _copy_list(value)

    def settings(self, index: int) -> dict[str, Any]:
        """Return the parameter group that is passed to `step`; `index` is the index of this group."""
        numbers = self.numbers.unbind(0)
        tensors = {
            name: tuple(numbers[i] for i in indices) if name == "betas" else numbers[indices[0]]
            for name, indices in self.positions.items()
        }
        # Inductor fuses foreach operations into a few kernels. Without foreach, inductor in torch 2.13 drops `alpha`
        # when it adds a tensor to a matrix product. In eager mode on the CPU, foreach does not support tensor learning
        # rates.
        foreach = self.on_device or torch.compiler.is_compiling()
        settings = {"foreach": foreach, "fused": False, "params": self.params, "group_index": index}
        if self.has_capturable:
            settings["capturable"] = foreach  # if True, torch does not branch on step counts
        return {**self.fixed, **tensors, **settings}


class _OptimizerView:
    """Proxy with the graph's tensors, which is passed to an optimizer's `step` as `self`."""

    def __init__(self, groups: list[_Group], grads: Sequence[Tensor]) -> None:
        self.groups = groups
        self.grads = grads
        self.state = _Scratch()
        self.param_groups = [group.settings(index) for index, group in enumerate(groups)]
        self.precise: list[tuple[list[Tensor], list[Tensor]]] = []

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        own = self.groups[group["group_index"]]
        lists[0].extend(own.params)
        lists[1].extend(self.grads[i] for i in own.indices)
        for target, values, is_counter in zip(lists[2:], own.state, own.counters, strict=True):
            converted = [value.to(own.count_dtype) for value in values] if is_counter else values
            target.extend(converted)
            if is_counter:
                self.precise.append((values, converted))
        return own.flag

    def write_back(self) -> None:
        """Copy the step counts and other counters back into the optimizer's state, rounded to its dtype."""
        for values, precise in self.precise:
            torch._foreach_copy_(values, precise)

    def _cuda_graph_capture_health_check(self) -> None:
        """Disable torch's capture check."""

    _accelerator_graph_capture_health_check = _cuda_graph_capture_health_check


def _sgd(optimizer: _OptimizerView) -> None:
    """Perform a step of `torch.optim.SGD` with existing momentum buffers.

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
            nesterov = torch._foreach_mul(momenta, group["momentum"]) if group["nesterov"] else None
            steps = momenta if nesterov is None else list(torch._foreach_add(steps, nesterov))
        torch._foreach_sub_(params, torch._foreach_mul(steps, group["lr"]))


class _Scratch:
    """Discards the optimizer's writes to `self.state[param]`; the state tensors are updated in place instead."""

    def __getitem__(self, key: Any) -> dict[str, Any]:
        return {}


def _group_by_settings(
    optimizer: Optimizer, params: Sequence[Tensor]
) -> list[tuple[list[dict[str, Any]], list[int]]]:
    """Return lists of groups with identical settings, each with the indices of the groups' tensors in `params`."""
    index = {param: i for i, param in enumerate(params)}
    merged: list[tuple[dict[str, Any], list[dict[str, Any]], list[int]]] = []
    for group in optimizer.param_groups:
        indices = [index[p] for p in group["params"] if p in index]
        if not indices:
            continue
        settings = _settings(optimizer, group)
        # torch's optimizers require one device and dtype per group.
        settings["kind"] = (params[indices[0]].device, params[indices[0]].dtype)
        for known, sources, members in merged:
            if known.keys() == settings.keys() and all(_is_same(known[n], settings[n]) for n in known):
                sources.append(group)
                members.extend(indices)
                break
        else:
            merged.append((settings, [group], indices))
    return [(sources, members) for _, sources, members in merged]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether values are identical; tensors are compared by identity, to avoid synchronization."""
    return one is other or not (_holds_tensors(one) or _holds_tensors(other) or one != other)


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, except `foreach`, `fused` and the keys that schedulers add."""
    names = optimizer.defaults.keys() - {"foreach", "fused"}
    return {name: value for name, value in group.items() if name in names}


def _move_counts(
    optimizer: Optimizer, sources: list[dict[str, Any]], params: list[Tensor], device: Any
) -> None:
    """Move step counts and other scalar optimizer state to the device, where the graph can read them."""
    for source in sources:
        source["capturable"] = True
    for param in params:
        state = optimizer.state[param]
        state |= {
            key: value.to(device)
            for key, value in state.items()
            if isinstance(value, Tensor) and not value.ndim
        }


def _read_state(
    optimizer: Optimizer, group: dict[str, Any], params: list[Tensor]
) -> tuple[list[str], Any, list[list[Tensor]]]:
    """Return the names of the optimizer's state lists, the result of `_init_group`, and the lists."""
    grads = [param.grad for param in params]
    for param in params:  # _init_group skips parameters without a gradient
        param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
    try:
        names = list(inspect.signature(type(optimizer)._init_group).parameters)[2:]  # type: ignore[attr-defined]
        lists: list[list[Any]] = [[] for _ in names]
        flag = type(optimizer)._init_group(optimizer, {**group, "params": params}, *lists)  # type: ignore[attr-defined]
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
    return names[2:], flag, lists[2:]


def _settings_as_tensors(optimizer: Optimizer, group: dict[str, Any]) -> list[str]:
    """Return the settings of a group that the optimizer accepts as tensors."""
    kind = type(optimizer).__name__
    names = [
        name
        for name in _TENSOR_SETTINGS
        if name in group and not (name == "betas" and kind in ("NAdam", "RAdam"))
    ]
    return [*names, "momentum"] if type(optimizer) is SGD and group["momentum"] else names


def _holds_tensors(value: Any) -> bool:
    """Return whether a setting is a tensor or contains one."""
    return any(isinstance(number, Tensor) for number in _as_list(value))


def _copy_list(value: Any) -> Any:
    """Return a copy of a list, because a training loop may change it in place; other values are returned unchanged."""
    return list(value) if isinstance(value, list) else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]
