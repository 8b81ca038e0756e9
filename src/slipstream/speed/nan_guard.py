"""Speed option: skip the step or stop if a loss or gradient is not finite, without a sync in every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _get_capturable_supported_devices

from slipstream.errors import NonFiniteLossError
from slipstream.sharding import is_sharded, local_shard
from slipstream.step.numerics import all_finite, restore_unless
from slipstream.typecheck import PositiveInt, check

if TYPE_CHECKING:
    from slipstream.optim import OptimWrapper

__all__ = ["NanGuardOptions", "StepGuard", "guard_step", "poison"]


@dataclass(frozen=True)
class NanGuardOptions:
    """Options of `nan_guard=dict(...)`, which handles losses and gradients that are not finite; a string sets `action`.

    Without this option, a non-finite loss still stops the run the next time losses are read for logging.
    """

    shorthand: ClassVar = "action"

    action: Literal["stop", "skip"] = "stop"
    """`stop` ends the run the next time losses are read for logging. `skip` skips the step without updating weights."""
    max_skipped: PositiveInt = 50
    """Maximum number of consecutive skipped steps (`skip`). If the limit is exceeded, the run stops."""

    def __post_init__(self) -> None:
        check(self.max_skipped, PositiveInt, "max_skipped")

    def hook_cfg(self) -> dict[str, Any]:
        """Return the configuration of the hook that implements the option."""
        return {"type": "NanGuardHook", **asdict(self)}


def poison(loss: Tensor) -> Tensor:
    """Return the loss unchanged if it is finite, otherwise NaN with NaN gradients.

    Summing gradients over ranks and over an accumulation window propagates NaN, so it is sufficient to check the
    gradients.
    """
    return loss * _nan_unless_finite(loss).to(loss.dtype)


def _poison_a_parameter(loss: Tensor) -> None:
    """If `loss` is not finite, set one parameter's gradient to NaN in the next backward pass, before DDP reduces it."""
    stack: list[Any] = [loss.grad_fn]
    seen = set(stack)
    while stack and not isinstance(getattr(stack[-1], "variable", None), nn.Parameter):
        sources = [
            source for source, _ in stack.pop().next_functions if source is not None and source not in seen
        ]
        stack += sources
        seen.update(sources)
    if not stack:
        return
    factor = _nan_unless_finite(loss)

    def multiply(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        handle.remove()
        return tuple(grad if grad is None else grad * factor.to(grad.device, grad.dtype) for grad in grads)

    handle = stack[-1].register_prehook(multiply)


def _nan_unless_finite(loss: Tensor) -> Tensor:
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


class StepGuard:
    """The `guard` of an `OptimWrapper`, which skips optimizer steps whose loss or gradients are not finite.

    A skipped step does not change weights, optimizer state or the model's buffers (BatchNorm statistics). With
    gradient accumulation, the whole accumulation window is skipped. All ranks skip the same steps. With a loss scale,
    the `GradScaler` skips steps as usual, and this class counts them.

    A step that creates optimizer state cannot be undone. Examples are the first step, and later steps in which
    some parameters receive their first gradient. In these steps, the host waits for the device, and calls the optimizer
    only if the gradients are finite. If an optimizer may store state on the host, such as a step count, the host waits
    in every step.

    Args:
        model: the model, unwrapped.
        device: device of the gradients.
        max_skipped: maximum number of consecutive skipped steps; the next `read` raises an error if there are more.
    """

    def __init__(self, model: nn.Module, device: torch.device, max_skipped: PositiveInt = 50) -> None:
        self.skips = torch.zeros(2, dtype=torch.int64, device=device)
        """The number of steps skipped since the last `read`, and the number of consecutive skipped steps."""
        self.max_skipped = max_skipped
        self._model = model
        self._saved_buffers: dict[str, Tensor] = {}
        self._undoable: set[Tensor] = set()  # parameters whose step can be undone

    def before_forward(self) -> None:
        """Copy the model's buffers at the start of an accumulation window."""
        if not self._saved_buffers:
            buffers = dict(self._model.named_buffers())
            self._saved_buffers = dict(zip(buffers, _copies(list(buffers.values())), strict=True))

    def poison(self, loss: Tensor) -> Tensor:
        """Return the loss for `backward`; see the function `poison`.

        A loss can be NaN while all gradients are zero (for example, a mean over zero pixels), so this method also sets
        the gradient of one parameter to NaN.
        """
        _poison_a_parameter(loss)
        return poison(loss)

    @torch.no_grad()
    def step(self, optim: OptimWrapper) -> None:
        """Call `optim.step()`, and undo or skip it if the gradients are not finite."""
        params = [p for p in optim.parameters() if p.grad is not None]
        finite = _finite_everywhere(params, self.skips.device)
        optim.finite = finite
        try:
            self._step(optim, params, finite)
        finally:
            optim.finite = None
        self.finish_step(finite)

    def _step(self, optim: OptimWrapper, params: list[nn.Parameter], finite: Tensor) -> None:
        if optim.loss_scaler is not None:
            optim.step()
        elif self._undoable.issuperset(params):
            guard_step(optim.optimizer, optim.step, finite)
        else:
            _store_counts_on_device(optim.optimizer)
            if finite:  # this check waits for the device
                optim.step()
                if _can_undo(optim.optimizer, params, finite.device):
                    self._undoable.update(params)

    @torch.no_grad()
    def finish_step(self, finite: Tensor) -> None:
        """Restore the model's buffers if `finite` is False, and count the step."""
        # Find buffers by name, because forward may assign a new tensor.
        current = {
            name: buffer for name, buffer in self._model.named_buffers() if name in self._saved_buffers
        }
        _restore_buffers_unless(
            finite, list(current.values()), [self._saved_buffers[name] for name in current]
        )
        self._saved_buffers = {}
        skipped = (~finite).to(torch.int64)
        total, consecutive = self.skips.unbind()
        self.skips.copy_(torch.stack([total + skipped, (consecutive + 1) * skipped]))

    def read(self) -> int:
        """Return the number of skipped steps since the last call. This synchronizes with the device.

        Raises:
            NonFiniteLossError: more than `max_skipped` consecutive steps were skipped.
        """
        total, consecutive = self.skips.tolist()
        self.skips[0] = 0
        if consecutive > self.max_skipped:
            steps = "last step was" if consecutive == 1 else f"last {consecutive} steps were"
            raise NonFiniteLossError(
                f"the {steps} skipped because the loss or a gradient was NaN or infinite. "
                f"nan_guard allows at most {self.max_skipped} in a row (max_skipped). Lower the learning rate, add a "
                "warm-up, or check the data for NaN or wrong labels"
            )
        return int(total)


def guard_step(optimizer: Optimizer, step: Callable[[], Any], finite: Tensor) -> None:
    """Call `step()`, which calls `optimizer.step()`, and undo it if `finite` (0-dim bool, on the device) is False.

    Weights and state are restored bit for bit, without synchronization. Fused kernels skip the update themselves. For
    other optimizers, weights and state are copied before the step. State that is a Python number or on a different
    device than `finite` is not restored. Every parameter with a gradient must already have optimizer state.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if (
        fused
        and all(group.get("fused") for group in optimizer.param_groups)
        and not any(map(is_sharded, params))
    ):
        # GradScaler uses the same attributes for fused kernels.
        optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()  # type: ignore[attr-defined]
        try:
            step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    before = [tensor.clone() for tensor in _updated_tensors(optimizer, params, finite.device)]
    step()
    restore_unless(finite, _updated_tensors(optimizer, params, finite.device), before)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of many small tensors, with one kernel per dtype and device."""
    copies: dict[int, Tensor] = {}
    for group in _group_by_kind(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        copies |= zip(map(id, group), _split(flat, group), strict=True)
    return [copies[id(tensor)] for tensor in tensors]


def _restore_buffers_unless(finite: Tensor, tensors: list[Tensor], before: list[Tensor]) -> None:
    """Copy `before` back into many small tensors if `finite` is False, with a few kernels per dtype and device."""
    old = dict(zip(map(id, tensors), before, strict=True))
    for group in _group_by_kind(tensors):
        current = torch.cat([tensor.reshape(-1) for tensor in group])
        previous = torch.cat([old[id(tensor)].reshape(-1) for tensor in group])
        torch._foreach_copy_(group, _split(torch.where(finite, current, previous), group))


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _group_by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors, grouped by dtype and device."""
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return groups.values()


def _can_undo(optimizer: Optimizer, params: list[nn.Parameter], device: torch.device) -> bool:
    """Return whether a step changes only the parameters and tensors on the device.

    Optimizers from other libraries may store step counts as Python numbers outside `optimizer.state`.
    """
    known = type(optimizer).__module__.startswith(("torch.optim.", "slipstream."))
    state = (value for param in params for value in optimizer.state.get(param, {}).values())
    return known and all(
        value is None or (isinstance(value, Tensor) and value.device == device) for value in state
    )


def _updated_tensors(optimizer: Optimizer, params: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return the local tensors that a step changes: parameters and their state."""
    state = (value for p in params for value in optimizer.state.get(p, {}).values())
    return [local_shard(t) for t in (*params, *state) if isinstance(t, Tensor) and t.device == device]


def _finite_everywhere(params: list[nn.Parameter], device: torch.device) -> Tensor:
    """Return whether all gradients on all ranks are finite, as a 0-dim bool tensor."""
    grads = [p.grad for p in params if p.grad is not None]
    parts = [part for part in map(_values, grads) if part.numel()]  # local shards can be empty
    finite = all_finite(parts) if parts else torch.ones((), dtype=torch.bool, device=device)
    if not any(map(is_sharded, grads)):
        return finite  # gradients are already reduced across ranks
    flag = finite.to(torch.int32)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return flag.bool()


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else local_shard(grad)


def _store_counts_on_device(optimizer: Optimizer) -> None:
    """Store the step counts of torch's optimizers on the accelerator, so that a skipped step can be undone."""
    supported = _get_capturable_supported_devices()
    for group in optimizer.param_groups:
        if "capturable" not in group or group.get("fused"):
            continue
        for param in group["params"]:
            if param.device.type in supported:
                group["capturable"] = True
                state = optimizer.state.get(param, {})
                if "step" in state:
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
