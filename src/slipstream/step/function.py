"""The training step as one function of three pieces: losses, obtain, finish.

- `losses` runs the forward pass and the loss.
- `obtain` computes the gradients of this batch.
- `finish` adds them to the accumulation window and, at its end, averages them over all ranks, divides them by the loss
  scale, checks that they are finite, runs the step parts around the optimizer's update, and adapts the loss scale.

Run as it is (`EagerStep`), the function is the eager step. Compiled (`GraphFunction`), it is the graph. The two differ
in how they obtain gradients (`backward`, `torch.autograd.grad`) and in how they update the weights. They do not depend
on the Runner or the registry, and return tensors on the device without waiting for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from slipstream.errors import ModelError
from slipstream.sharding import is_sharded
from slipstream.step.leaves import flatten
from slipstream.step.losses import AVERAGED_OVER
from slipstream.step.numerics import HostNumber, LossScale, check_finite
from slipstream.step.parts import StepPart, has_gradients
from slipstream.torch_calls import run_optimizer

if TYPE_CHECKING:
    from slipstream.logging import PhaseTimes
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.captured import Capture
    from slipstream.step.sync import GradientSync

__all__ = [
    "CompiledStep", "EagerStep", "EagerUpdate", "GradBuffers", "GraphFunction", "LossOf", "Outputs", "Step",
    "check_backward", "finish",
]  # fmt: skip

LossOf = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss to minimize and the values to log, including `loss`, as 0-dim tensors."""
Outputs = tuple[dict[str, Tensor], Tensor | None]
"""The values to log, and whether the losses and gradients were finite (0-dim bool; None if this is not checked)."""
GradBuffers = list[Tensor] | None
"""The gradients of the accumulation window, which a graph changes in place. The eager step uses `p.grad`."""

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


class StepFunction(ABC):
    """The training step of one optimizer; see the module's docstring.

    Args:
        loss_of: returns the loss to minimize and the values to log, given the inputs of a batch.
        optim: the optimizer wrapper, with the loss scale, the accumulation window and the step parts.
    """

    repeats: bool
    """Whether a part computes the gradients of a batch several times."""
    trained: list[nn.Parameter]
    """The parameters to which the gradients of `obtain` belong."""
    # The number of batches in the accumulation window, in a graph, which must not treat it as a constant.
    window_size: HostNumber | None = None

    def __init__(self, loss_of: LossOf, optim: OptimWrapper) -> None:
        self.loss_of, self.optim, self.parts = loss_of, optim, optim.parts

    def run(self, inputs: Any, grad_buffers: GradBuffers, ends_window: bool) -> Outputs:
        """Train on the inputs of one batch.

        Args:
            inputs: the argument of `loss_of`.
            grad_buffers: the gradients of the accumulation window.
            ends_window: whether the batch is the last of its accumulation window.
        """
        loss, logs = self.losses(inputs)
        weight = None
        if AVERAGED_OVER in logs or self.optim.objects is not None:
            weight = self.optim.weight_of(logs.get(AVERAGED_OVER), loss, self.window_size)
        grads = self.obtain(loss if weight is None else loss * weight, inputs)
        for part in self.parts:
            if part.replaces_gradients:

                def again() -> list[Tensor]:
                    loss = self.losses(inputs)[0]
                    return self.obtain(loss if weight is None else loss * weight, inputs)

                grads = part.gradients(self.trained, again, grads)
        grads = self.accumulate(grads, grad_buffers, ends_window)
        if not ends_window:
            return logs, None
        values, finite = self.finish(grads)
        return {**logs, **values}, finite

    def losses(self, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the forward pass; return the loss and the values to log."""
        with self.context():
            loss, logs = self.loss_of(inputs)
        for part in self.parts:
            if "after_loss" in part.implements:
                part.after_loss(loss)
        return loss, logs

    @abstractmethod
    def context(self) -> Any:
        """Return the context manager of the forward pass."""

    @abstractmethod
    def obtain(self, loss: Tensor, inputs: Any) -> list[Tensor]:
        """Return this batch's gradients, each in its own dense storage, or [] if they were added to `p.grad`."""

    @abstractmethod
    def accumulate(self, grads: list[Tensor], grad_buffers: GradBuffers, ends_window: bool) -> list[Tensor]:
        """Add the gradients to those of the window, and return the sum."""

    @abstractmethod
    def finish(self, grads: list[Tensor]) -> Outputs:
        """Update the weights with the gradients of the window."""


Update = Callable[[Sequence[nn.Parameter], list[Tensor], Tensor | None], None]
"""`update(params, grads, finite)` updates parameters, unless `finite` (0-dim bool; None for True) is false."""


class EagerUpdate:
    """Runs an optimizer's step, unless a gradient or loss was not finite.

    Fused kernels skip the step themselves. For other optimizers, and for a step that creates optimizer state, the host
    waits for the device, and calls the optimizer only if everything is finite.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._updated: set[Tensor] = set()  # parameters that a checked step has updated

    def __call__(
        self, params: Sequence[nn.Parameter], grads: list[Tensor], finite: Tensor | None, **kwargs: Any
    ) -> None:
        """Update `params`."""
        optimizer: Any = self._optimizer
        if finite is None:
            run_optimizer(optimizer, **kwargs)
        elif (
            self._updated.issuperset(params)
            and all(group.get("fused") for group in optimizer.param_groups)
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and not any(map(is_sharded, params))
        ):
            # GradScaler uses these attributes.
            optimizer.grad_scale, optimizer.found_inf = None, (~finite).float()
            try:
                optimizer.step(**kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif finite:  # this check waits for the device
            optimizer.step(**kwargs)
            self._updated.update(params)


def finish(
    params: list[nn.Parameter],
    grads: list[Tensor],
    parts: Sequence[StepPart],
    scale: LossScale | None,
    update: Update,
    state: Sequence[Tensor] | None = None,
) -> Outputs:
    """Update the weights with the gradients of an accumulation window.

    If losses and gradients are checked and one is not finite, all changes to the parameters, to `state` and to the
    parts' state are undone.

    Args:
        params, grads: the trained parameters and their gradients, which are changed in place.
        parts: the step parts.
        scale: the loss scale by which the gradients are multiplied.
        update: the optimizer's update.
        state: the optimizer's state, in a graph, whose gradients and flags are averaged over all ranks. None for an
            eager `update`, which skips the step itself.
    """
    if not parts and scale is None:
        update(params, grads, None)
        return {}, None
    flags, finite = [part.nonfinite for part in parts if part.nonfinite is not None], None
    if scale is not None or flags:
        grads, finite = check_finite(grads, flags, scale, local=state is None)
    logs: dict[str, Tensor] = {}
    before = [part for part in parts if "before_update" in part.implements]
    after = [part for part in parts if "after_update" in part.implements]
    previous: list[Tensor] = []
    if any(part.needs_previous for part in parts) or (finite is not None and (after or state is not None)):
        previous = [param.detach().clone() for param in params]
    changed: list[Tensor] = []
    if finite is not None:
        around = [part for part in parts if part in before or part in after]
        changed = [*(state or ()), *(t for part in around for t in part.state().values())]
    old = [tensor.clone() for tensor in changed]
    for part in before:
        logs.update(part.before_update(params, grads) or {})
    update(params, grads, finite)
    for part in after:
        part.after_update(params, previous)
    if finite is not None:
        # In a compiled graph, this copy is fused into the update and causes no additional memory traffic.
        updated = params if after or state is not None else []
        for tensor, value in zip([*changed, *updated], [*old, *previous], strict=False):
            tensor.copy_(torch.where(finite, tensor, value))
    return logs, finite


class GraphFunction(StepFunction):
    """The step for `torch.compile`, which must be traceable.

    Args:
        captured: the trained parameters, the accumulation window, the loss scale and the update.
        sync: averages gradients over all ranks; None for a single rank.
    """

    def __init__(self, loss_of: LossOf, captured: Capture, sync: GradientSync | None) -> None:
        super().__init__(loss_of, captured.optim)
        self.repeats = any(part.replaces_gradients for part in self.parts)
        self.trained, self.scale = captured.params, captured.scale
        self.update, self.sync, self.window_size = captured.update, sync, captured.window
        self.window = captured.window if captured.adds_gradients else None

    def run(self, inputs: Any, grad_buffers: GradBuffers, ends_window: bool) -> Outputs:
        """Train on the inputs of one batch, and process the new weights."""
        logs, finite = super().run(inputs, grad_buffers, ends_window)
        if not ends_window or self.update is not None:
            for part in self.parts:
                if not part.on_host and "after_batch" in part.implements:
                    part.after_batch()
        return logs, finite

    def context(self) -> Any:
        """Return the context manager for autocast."""
        return self.optim.autocast()

    def obtain(self, loss: Tensor, inputs: Any) -> list[Tensor]:
        """Return the gradients. Several results of autograd may be one tensor, so they are cloned."""
        if self.window is not None:
            loss = loss / self.window.read()
        if self.scale is not None:
            loss = loss * self.scale.scale
        grads = [grad.clone() for grad in torch.autograd.grad(loss, self.trained)]
        return self.sync(grads) if self.repeats and self.sync is not None else grads

    @torch.no_grad()
    def accumulate(self, grads: list[Tensor], grad_buffers: GradBuffers, ends_window: bool) -> list[Tensor]:
        """Add the gradients to `grad_buffers`; at the end of a window, average them over all ranks."""
        if self.window is not None and grad_buffers is not None:
            grads = list(torch._foreach_add(grad_buffers, grads))
        if ends_window and self.sync is not None and not self.repeats:
            flags = [part.nonfinite for part in self.parts if part.nonfinite is not None]
            means = self.sync([*grads, *flags])
            grads = means[: len(grads)]
            for flag, mean in zip(flags, means[len(grads) :], strict=True):
                flag.copy_(mean)
        if grad_buffers is not None and not (ends_window and self.update is not None):
            torch._foreach_copy_(grad_buffers, grads)
        return grads

    @torch.no_grad()
    def finish(self, grads: list[Tensor]) -> Outputs:
        """Update the weights, unless the optimizer runs after the graph."""
        if self.update is None:
            return {}, None
        if self.optim.objects is not None:
            self.optim.normalize(grads)
        return finish(self.trained, grads, self.parts, self.scale, self.update, self.update.state)


class EagerStep(StepFunction):
    """The training step without compilation, which calls the methods of the optimizer wrapper.

    A wrapper class that overrides `scale_loss`, `backward`, `step` or `zero_grad` replaces that piece. If it overrides
    `update_params`, this method replaces both obtain and finish.

    Args:
        loss_of: returns the loss to minimize and the values to log, given the inputs; may call a DDP-wrapped model.
        model: the module that `loss_of` calls, which may be wrapped. Unless a part replaces the gradients, gradient
            sync is skipped before the last batch of an accumulation window.
        optim: the optimizer wrapper.
        prepare: `prepare(batch) -> inputs`, for example a transfer to the device; runs under autocast, as in MMEngine.
        phases: measures the host time of each phase, if set.
    """

    def __init__(
        self,
        loss_of: LossOf,
        model: nn.Module,
        optim: OptimWrapper,
        prepare: Callable[[Any], Any] = lambda batch: batch,
        phases: PhaseTimes | None = None,
    ) -> None:
        super().__init__(loss_of, optim)
        self.model, self.phases = model, phases
        self._prepare = prepare
        self._on_gradients: Callable[[], None] | None = None
        # Whether backward computes only the gradients of this optimizer's parameters; None before the first batch.
        self._only_own_gradients: bool | None = None
        self._reaches_inputs = False
        # Parameters of other optimizers that receive gradients, but keep theirs.
        self._others: list[nn.Parameter] = []
        self.trained = []  # the parameters that received a gradient in the first of several passes over the batch
        self._last: dict[nn.Parameter, Tensor] = {}  # gradients of the last pass over the batch
        self._replaces_update = not type(optim).update_params.__module__.startswith("slipstream.")

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        return self.train(self.prepare(batch))

    def prepare(self, batch: Any) -> Any:
        """Start a batch, and return its inputs."""
        phases = self.phases
        if phases is not None:
            previous = phases.current
            phases.switch("preprocess")
        for part in self.parts:
            if "before_batch" in part.implements:
                part.before_batch()
        with self.optim.autocast():
            inputs = self._prepare(batch)
        if phases is not None:
            phases.switch(previous)
        return inputs

    def train(
        self, inputs: Any, with_host_parts: bool = True, on_gradients: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        """Train on the inputs of a batch, which `prepare` has returned.

        Args:
            with_host_parts: whether to also call `after_batch` for parts with `on_host`.
            on_gradients: called before an update, when `p.grad` contains the gradients of the accumulation window.
        """
        optim, self.trained = self.optim, []
        self.repeats = any(part.replaces_gradients for part in self.parts)
        if self._only_own_gradients is False and optim.begins_window() and has_gradients(optim.parameters()):
            optim.zero_grad()  # other steps' gradients, because backward is not restricted
        self._on_gradients = on_gradients
        window = optim.accumulation
        try:
            logs, _ = self.run(inputs, None, window.counts == 1 or window.ends_next)
        except RuntimeError as error:
            check_backward(error)
            raise
        finally:
            self._on_gradients = None
        if (norm := optim.logs.get("grad_norm")) is not None:
            logs["grad_norm"] = norm  # in batches without an update, that of the last update
        for part in self.parts:
            if "after_batch" in part.implements and (with_host_parts or not part.on_host):
                part.after_batch()
            if "count_batch" in part.implements:
                part.count_batch()
        return logs

    def context(self) -> Any:
        """Return the context manager for autocast and, before the last batch of a window, without gradient sync."""
        if self.phases is not None:
            self.phases.switch("forward")
        # If several passes are synchronized, all ranks have the same gradients.
        return self.optim.autocast() if self.repeats else self.optim.optim_context(self.model)

    def obtain(self, loss: Tensor, inputs: Any) -> list[Tensor]:
        """Run backward, which adds the gradients to `p.grad`.

        For a part that requires the gradients of this batch alone, restore `p.grad`, and return the gradients.
        """
        optim = self.optim
        if self.phases is not None:
            self.phases.switch("backward")
        if self._replaces_update:
            optim.update_params(loss)
            return []
        if self._only_own_gradients is None:
            self._inspect_graph(loss)
        targets: list[Tensor] = []  # restrict backward to this optimizer's parameters and to inputs
        if self._only_own_gradients:
            groups, leaves = optim.optimizer.param_groups, flatten(inputs)[0]
            targets += [p for group in groups for p in group["params"] if p.requires_grad]
            if self._reaches_inputs or any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
                targets += _input_leaves(_nodes(loss))
        params: list[nn.Parameter] = []
        if self.repeats:
            params = [param for param in optim.parameters() if param.requires_grad]
            position = optim.accumulation.position
        window = self._take_gradients([*params, *self._others]) if params or self._others else {}
        optim.obtain(loss, **({"inputs": targets} if targets else {}))
        for param in self._others:
            param.grad = window.pop(param, None)
        if not self.repeats:
            return []
        grads = self._last = self._take_gradients(params)
        optim.accumulation.position = position  # `accumulate` counts the batch, after all passes over it
        for param, grad in window.items():
            param.grad = grad
        self.trained = self.trained or list(grads)
        return [grads[param] if param in grads else torch.zeros_like(param) for param in self.trained]

    def _take_gradients(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        # DDP's gradients are views of its buckets, which the next backward pass overwrites.
        views = isinstance(self.model, DistributedDataParallel)
        grads = {p: p.grad.clone() if views else p.grad for p in params if p.grad is not None}
        for param in params:
            param.grad = None
        return grads

    def accumulate(self, grads: list[Tensor], grad_buffers: GradBuffers, ends_window: bool) -> list[Tensor]:
        """Add the gradients to `p.grad`, if `obtain` has not, for the parameters with a gradient in the last pass."""
        if self.trained:
            self.optim.accumulation.advance()
            final = self._last | {p: g for p, g in zip(self.trained, grads, strict=True) if p in self._last}
            for param, grad in final.items():
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        return grads

    def finish(self, grads: list[Tensor]) -> Outputs:
        """Update the weights."""
        optim = self.optim
        if not self._replaces_update:
            if self.phases is not None:
                self.phases.switch("optimizer")
            if self._on_gradients is not None:
                self._on_gradients()
            optim.finish()
        return optim.logs, None

    def _inspect_graph(self, loss: Tensor) -> None:
        """Find out whether backward can be restricted, and whether the loss depends on inputs that require grad."""
        nodes, params = _nodes(loss), {*self.optim.parameters()}
        # DDP and FSDP wait for the gradients of all parameters; reentrant checkpoints do not support `inputs`.
        is_wrapped = isinstance(self.model, DistributedDataParallel) or any(map(is_sharded, params))
        is_reentrant = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
        self._only_own_gradients = not (is_wrapped or is_reentrant)
        self._reaches_inputs = bool(_input_leaves(nodes))
        if is_reentrant and not is_wrapped:
            leaves = (getattr(node, "variable", None) for node in nodes)
            self._others = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and leaf not in params]


def _nodes(loss: Tensor) -> set[Any]:
    """Return the nodes of a loss's autograd graph."""
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        sources = {source for source, _ in nodes.pop().next_functions if source is not None} - seen
        seen |= sources
        nodes += sources
    return seen


def _input_leaves(nodes: set[Any]) -> list[Tensor]:
    """Return the leaves of an autograd graph that are not parameters."""
    leaves = [getattr(node, "variable", None) for node in nodes]
    return [x for x in leaves if isinstance(x, Tensor) and x.is_leaf and not isinstance(x, nn.Parameter)]


def check_backward(error: RuntimeError) -> None:
    """Raise a `ModelError` if a backward pass failed because a compiled model does not support it."""
    if any(part in str(error) for part in _UNSUPPORTED):
        raise ModelError(
            "the loss differentiates the model's gradients (create_graph=True) or runs several backward passes through "
            "the model's outputs (retain_graph=True), neither of which a compiled model supports; set compile=False, "
            "or set compile=dict(scope='step') if the whole step can be compiled as one graph"
        ) from error
