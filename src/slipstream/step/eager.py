"""The interfaces of training steps, and the eager step: forward, loss, backward, gradient sync, clipping, update.

The steps do not depend on the Runner or the registry. They return device tensors without a device synchronization.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from slipstream.errors import LossError, ModelError
from slipstream.step.function import EagerFunction, Losses, Reduce
from slipstream.step.parts import has_gradients

if TYPE_CHECKING:
    from slipstream.logging import PhaseTimes
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = [
    "CompiledStep",
    "EagerStep",
    "Step",
    "check_compiled_backward",
    "sum_losses",
]

_UNSUPPORTED = ("non-empty donated buffers", "does not currently support double backward")
"""Parts of torch's error messages for a second backward pass through a compiled model."""


class Step(Protocol):
    """Interface of a training step."""

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on `batch`, and return the values to log, including `loss`, as 0-dim tensors on the device."""
        ...


class CompiledStep(ABC):
    """Interface of `GraphStep`, the step that is compiled as one graph if possible, which eager runs do not import."""

    batches: int
    """Number of batches that the compiled code has trained on."""

    @property
    @abstractmethod
    def uses_graph(self) -> bool:
        """Whether the step uses a graph, either now or once the graph has been compiled and verified."""

    @property
    @abstractmethod
    def has_graph(self) -> bool:
        """Whether the step has a compiled and verified graph, which it uses for batches of the same shape."""

    @abstractmethod
    def close(self) -> None:
        """Drop the compiled code; later batches run eagerly."""


class EagerStep:
    """The training step without compilation.

    It is also the fallback for a compiled step, which prepares the inputs and calls `train`.

    Args:
        forward: `forward(inputs) -> losses`, a dict of scalar tensors; may call a DDP-wrapped model.
        model: the module that `forward` calls, which may be wrapped. Unless a part replaces the gradients, gradient
            sync is skipped before the last batch of an accumulation window.
        optim: the optimizer wrapper.
        reduce: returns the loss to minimize and the values to log; by default, `sum_losses`.
        prepare: `prepare(batch) -> inputs`, for example a transfer to the device; runs under autocast, as in MMEngine.
        phases: measures the host time of each phase, if set.
    """

    def __init__(
        self,
        forward: Callable[[Any], Losses],
        model: nn.Module,
        optim: OptimWrapper,
        reduce: Reduce | None = None,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        phases: PhaseTimes | None = None,
    ) -> None:
        self.prepare, self.optim = prepare, optim
        self.function = EagerFunction(forward, reduce or sum_losses, optim, model, phases)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        for part in self.optim.parts:
            if "before_batch" in part.implements:
                part.before_batch()
        with self.optim.autocast():
            inputs = self.prepare(batch)
        return self.train(inputs)

    def train(
        self, inputs: Any, with_host_parts: bool = True, on_gradients: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        """Train on the prepared inputs of a batch, after `StepPart.before_batch` has been called for it.

        Args:
            with_host_parts: whether to also call `after_batch` for parts with `on_host`.
            on_gradients: called before an update, when `p.grad` contains the gradients of the accumulation window.
        """
        optim, function = self.optim, self.function
        if (
            function.only_own_gradients is False
            and optim.begins_window()
            and has_gradients(optim.parameters())
        ):
            optim.zero_grad()  # other steps' gradients, because backward is not restricted
        function.on_gradients = on_gradients
        try:
            logs, _ = function(inputs, None, optim.should_sync())
        except RuntimeError as error:
            check_compiled_backward(error)
            raise
        finally:
            function.on_gradients = None
        if (norm := optim.logs.get("grad_norm")) is not None:
            logs["grad_norm"] = norm  # in batches without an update, that of the last update
        for part in optim.parts:
            if "after_batch" in part.implements and (with_host_parts or not part.on_host):
                part.after_batch()
            if "count_batch" in part.implements:
                part.count_batch()
        return logs


def sum_losses(losses: Losses) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of all entries whose name contains `loss`, and the values to log as detached 0-dim tensors.

    All entries are logged. The first value is `loss`: the entry with this name or, if there is none, the sum.

    Raises:
        LossError: no entry's name contains `loss`, or an entry is neither a scalar tensor nor a list of scalar tensors.
    """
    if not isinstance(losses, Mapping):
        raise LossError(
            f"forward in mode 'loss' must return a dict of scalar tensors such as {{'loss': loss}}, "
            f"not {type(losses).__name__}"
        )
    total: Tensor | None = None
    logs: dict[str, Tensor] = {}
    for name, value in losses.items():
        scalar = _scalar(name, value)
        logs[name] = scalar.detach()
        if "loss" in name:
            total = scalar if total is None else total + scalar
    if total is None:
        raise LossError(
            f"no entry has 'loss' in its name, so there is nothing to minimize; got {sorted(losses)}. Add 'loss' to "
            "the name of the entry to minimize"
        )
    return total, {"loss": total.detach(), **logs}


def _scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.ndim == 0:
            return value
        if value.numel() == 1:
            return value.reshape(())
        shape = tuple(value.shape)
        raise LossError(f"'{name}' has shape {shape}, but a loss must be a scalar; use its mean() or sum()")
    if isinstance(value, list | tuple) and value:
        scalars = [_scalar(f"{name}[{i}]", item) for i, item in enumerate(value)]
        return sum(scalars[1:], start=scalars[0])
    raise LossError(f"'{name}' must be a scalar tensor or a list of scalar tensors, not {value!r}")


# ---- losses that a compiled model does not support ------------------------------------------------------


def check_compiled_backward(
    error: RuntimeError,
    remedy: str = "set compile=dict(scope='step') if the whole step can be compiled as one graph",
) -> None:
    """Raise a `ModelError` if a backward pass failed because a compiled model does not support it."""
    if any(part in str(error) for part in _UNSUPPORTED):
        raise ModelError(
            "the loss differentiates the model's gradients (create_graph=True) or runs several backward passes through "
            "the model's outputs (retain_graph=True), neither of which a compiled model supports; set compile=False, "
            f"or {remedy}"
        ) from error
