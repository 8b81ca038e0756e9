"""Option: what happens when a loss or a gradient is no longer finite, decided without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from slipstream.config import options
from slipstream.dist.sharding import is_sharded, local
from slipstream.errors import ConfigError, NonFiniteLossError, did_you_mean
from slipstream.step.numerics import all_finite, keep_unless

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper

__all__ = ["Locator", "NanGuardOptions", "SkipCount", "StepGuard", "guard_step", "poison", "read_nan_guard"]

_ACTIONS = ("stop", "skip")


@dataclass(frozen=True)
class NanGuardOptions:
    """`nan_guard=dict(...)`."""

    action: Literal["stop", "skip"] = "stop"
    """`stop`: the run ends at the next log line; `skip`: the step leaves the weights as they were."""
    locate: bool = False
    """Name the first module whose output was not finite; costs a few small kernels after every module."""
    max_skipped: int = 50
    """More skipped steps in a row than this end the run."""

    def __post_init__(self) -> None:
        if self.max_skipped < 1:
            raise ConfigError(f"must be at least 1, not {self.max_skipped}", "max_skipped")

    def hook_cfg(self) -> dict[str, Any]:
        """Return the configuration of the hook that carries it out."""
        return {"type": "NanGuardHook", **asdict(self)}


def read_nan_guard(value: Any) -> NanGuardOptions | None:
    """Read `nan_guard` as a configuration has it: `'stop'`, `'skip'`, a dict, True (`'stop'`), None or False.

    None and False leave what every run does: a loss that is not finite stops it at the next log line.

    Raises:
        ConfigError: anything else, or an unknown option.
    """
    if value is None or value is False:
        return None
    if isinstance(value, str) and value not in _ACTIONS:
        hint = did_you_mean(value, _ACTIONS)
        raise ConfigError(f"must be 'stop', 'skip' or a dict, not {value!r}{hint}", "nan_guard")
    given = {"action": value} if isinstance(value, str) else {} if value is True else value
    return options(NanGuardOptions, given, "nan_guard")


def poison(loss: Tensor) -> Tensor:
    """Return the same loss, whose gradients are NaN if it is not finite itself.

    So the gradients alone tell whether a step is sound: their sum over ranks and over the batches of an
    accumulation window carries the NaN to everybody, and no rank has to ask the others about their losses.
    """
    return loss * _nan_unless_finite(loss).to(loss.dtype)


def _poison_a_parameter(loss: Tensor) -> None:
    """Let the coming backward make the gradient of one parameter NaN, before DDP sends it, if `loss` is not finite."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set(waiting)
    while waiting and not isinstance(getattr(waiting[-1], "variable", None), nn.Parameter):
        sources = [
            source for source, _ in waiting.pop().next_functions if source is not None and source not in seen
        ]
        waiting += sources
        seen.update(sources)
    if not waiting:
        return
    factor = _nan_unless_finite(loss)

    def spoil(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        handle.remove()
        return tuple(grad if grad is None else grad * factor.to(grad.device, grad.dtype) for grad in grads)

    handle = waiting[-1].register_prehook(spoil)


def _nan_unless_finite(loss: Tensor) -> Tensor:
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


class SkipCount:
    """Counts skipped steps on the device.

    Args:
        device: where the steps are decided.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(2, dtype=torch.int64, device=device)
        """Skipped steps since the last `read`, and those in a row up to now; changed in place."""

    def add(self, finite: Tensor) -> None:
        """Count one step; `finite` is a 0-dim bool tensor. Traceable."""
        skipped = (~finite).to(torch.int64)
        total, in_a_row = self.tensor.unbind()
        self.tensor.copy_(torch.stack([total + skipped, (in_a_row + 1) * skipped]))

    def read(self) -> tuple[int, int]:
        """Return both numbers, which waits for the device, and start the first anew."""
        total, in_a_row = self.tensor.tolist()
        self.tensor[0] = 0
        return total, in_a_row


class StepGuard:
    """Lets an `OptimWrapper` (its `guard`) skip the optimizer steps whose loss or gradients are not finite.

    A skipped step leaves weights, optimizer state and the model's buffers (BatchNorm statistics) as they were before
    its first forward; with accumulation that is the whole window. All ranks skip together. With a loss scale the
    scaler itself decides, as always, and its skipped steps are counted here.

    The first step, and one for which new parameters have a gradient, makes optimizer state, which could not be undone:
    there the host waits for the device's decision.

    Args:
        model: the model, unwrapped.
        device: where its gradients are.
        max_skipped: more skipped steps in a row than this end the run, at the next `read`.
    """

    def __init__(self, model: nn.Module, device: torch.device, max_skipped: int = 50) -> None:
        self.count = SkipCount(device)
        self.max_skipped = max_skipped
        self._model = model
        self._before: dict[str, Tensor] = {}
        self._seen: set[Tensor] = set()  # parameters that have their optimizer state

    def before_forward(self) -> None:
        """Remember the model's buffers, unless this is in the middle of an accumulation window."""
        if not self._before:
            self._before = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def poison(self, loss: Tensor) -> Tensor:
        """Return the loss to run backward from; see the function of this name.

        A loss may be NaN without any gradient (a mean over no pixel): that of one parameter is made NaN all the same.
        """
        _poison_a_parameter(loss)
        return poison(loss)

    @torch.no_grad()
    def step(self, optim: OptimWrapper) -> None:
        """Let `optim` step if its gradients are finite."""
        params = [p for p in optim.parameters() if p.grad is not None]
        finite = _finite_everywhere(params, self.count.tensor.device)
        if optim.loss_scaler is not None:
            optim.step()
        elif self._seen.issuperset(params):
            guard_step(optim.optimizer, optim.step, finite)
        else:
            _count_on_device(optim.optimizer)
            if finite:  # waits
                optim.step()
                self._seen.update(params)
        self.settle(finite)

    @torch.no_grad()
    def settle(self, finite: Tensor) -> None:
        """End a step: put the model's buffers back unless `finite`, and count it."""
        # By name, since forward may assign another tensor.
        now = {name: buffer for name, buffer in self._model.named_buffers() if name in self._before}
        keep_unless(finite, list(now.values()), [self._before[name] for name in now])
        self._before = {}
        self.count.add(finite)

    def read(self) -> int:
        """Return how many steps were skipped since the last call, which waits for the device.

        Raises:
            NonFiniteLossError: too many in a row.
        """
        total, in_a_row = self.count.read()
        if in_a_row > self.max_skipped:
            raise NonFiniteLossError(
                f"the last {in_a_row} steps were skipped, each with a loss or a gradient that is NaN or infinite; "
                f"nan_guard allows {self.max_skipped} in a row (max_skipped). Lower the learning rate or add a "
                "warm-up, look for NaN or wrong labels in the data, or find the place with "
                "nan_guard=dict(action='stop', locate=True)"
            )
        return total


def guard_step(optimizer: Optimizer, step: Callable[[], Any], finite: Tensor) -> None:
    """Call `step()`, which steps `optimizer`, and undo it unless `finite` (0-dim bool, on the device) is true.

    Weights and state keep their values bit for bit, and the host does not wait. Fused kernels skip by themselves;
    other optimizers need a copy of weights and state for as long as the step takes. What an optimizer keeps as a
    Python number, or on another device than `finite`, counts skipped steps, too. Every parameter with a gradient
    must have its state already.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if (
        fused
        and all(group.get("fused") for group in optimizer.param_groups)
        and not any(map(is_sharded, params))
    ):
        # As a GradScaler talks to fused kernels.
        optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()  # type: ignore[attr-defined]
        try:
            step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    before = [tensor.clone() for tensor in _moving(optimizer, params, finite.device)]
    step()
    keep_unless(finite, _moving(optimizer, params, finite.device), before)


def _moving(optimizer: Optimizer, params: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return this process's part of what a step changes: parameters and their state."""
    state = (value for p in params for value in optimizer.state.get(p, {}).values())
    return [local(t) for t in (*params, *state) if isinstance(t, Tensor) and t.device == device]


def _finite_everywhere(params: list[nn.Parameter], device: torch.device) -> Tensor:
    """Return the 0-dim bool whether all gradients are finite, the same on all ranks."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [part for part in map(_values, grads) if part.numel()]  # a rank may hold no row of a sharded one
    finite = all_finite(parts) if parts else torch.ones((), dtype=torch.bool, device=device)
    if not any(map(is_sharded, grads)):
        return finite  # gradients are sums over the ranks, so what one rank sees all see
    flag = finite.to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return flag.bool()


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else local(grad)


def _count_on_device(optimizer: Optimizer) -> None:
    """Let torch's own optimizers count their steps on the GPU, where a skipped step's count can be undone."""
    for group in optimizer.param_groups:
        if "capturable" not in group or group.get("fused"):
            continue
        for param in group["params"]:
            if param.device.type == "cuda":
                group["capturable"] = True
                state = optimizer.state.get(param, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)


class Locator:
    """Finds the first module whose output is not finite, through forward hooks that only write to the device.

    A step costs a few small kernels more for each module; the hooks can be traced by `torch.compile(fullgraph=True)`.
    Only forwards with gradient are watched.

    Args:
        model: the model, unwrapped and on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.named_modules())
        device = next(model.parameters()).device
        self._clock = torch.zeros((), dtype=torch.int64, device=device)
        # For each module: when its output was first not finite (0: never), and whether its inputs were not either.
        self._found = torch.zeros(len(self.modules), 2, dtype=torch.int64, device=device)
        self._hooks = [
            module.register_forward_hook(partial(self._look, index), with_kwargs=True)
            for index, (_, module) in enumerate(self.modules)
        ]

    def _look(self, index: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        with torch.no_grad():
            self._clock.add_(1)
            found = self._found[index]
            now = torch.stack([self._clock, self._broken((args, kwargs)).to(torch.int64)])
            found.copy_(torch.where(self._broken(output) & (found[0] == 0), now, found))

    def _broken(self, values: Any) -> Tensor:
        tensors = [
            local(value)
            for value in tree_leaves(values)
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        return ~all_finite(tensors) if tensors else torch.zeros_like(self._clock, dtype=torch.bool)

    def report(self) -> str:
        """Say what was found since the last report, which waits for the device, and start anew."""
        found = self._found.tolist()
        self._found.zero_()
        times = {time: index for index, (time, _) in enumerate(found) if time}
        if not times:
            return "The output of every module was finite: it is the gradients that are not (or the labels)"
        index = times[min(times)]
        name, module = self.modules[index]
        place = f"module '{name}' ({type(module).__name__})" if name else f"{type(module).__name__} itself"
        inputs = "were not finite either" if found[index][1] else "were finite"
        return f"The first output that was not finite is that of {place}; its inputs {inputs}"

    def close(self) -> None:
        """Take the hooks out of the model."""
        for hook in self._hooks:
            hook.remove()
