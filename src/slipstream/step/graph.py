"""One training step as one compiled graph: forward, loss, backward, gradient sync, clipping, optimizer, average.

`GraphStep._define` below is the step, top to bottom. Everything it changes (weights, buffers, optimizer state, loss
scale, averages) are the very tensors that the module, the optimizer and the others hold, changed in place: a
checkpoint, a validation or an eager step finds the same state, whichever step ran.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slipstream.step.captured import Captured, Outputs, Shapes
from slipstream.step.eager import Losses, Step, sum_losses
from slipstream.step.numerics import Average, LossScale, all_finite, keep_unless
from slipstream.step.proof import (
    NotCapturedError,
    Snapshot,
    WrongNumbersError,
    compare,
    evidence,
    random_state,
    seen_gradients,
)
from slipstream.step.sync import GradientSync

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper

__all__ = ["CAPTURE_ERRORS", "GraphStep"]

CAPTURE_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
"""What compilation raises; always before the graph has changed anything."""
_GRAPHS = 8
"""As often may the trained parameters or their groups change, as torch may recompile a function."""


class GraphStep:
    """The step as one graph, of a model whose step the autograd engine could also run.

    The first batch is trained twice: by `eager`, whose result is undone, and by the graph, whose gradients must agree
    with it. Batches of another shape than the first are trained by `eager`, until they are many enough to pay for a
    graph with variable shapes. Values in a batch that are not tensors may change from step to step if the model does
    not look at them, or if they are numbers; a forward that branches on a file name is left to `recover`.

    Several ranks take the same path at every step: what one of them cannot capture, none uses, and batches of any
    shape go into graphs, since another rank's may have the first shape.

    Args:
        loss_of: `loss_of(inputs) -> losses` for inputs on the device; calls the bare model, and is traceable.
        prepare: `prepare(batch) -> inputs`, what is done outside the graph: transfer, normalisation.
        model: the bare model.
        optim: holds the optimizer, and says how to scale, accumulate and clip.
        eager: the same training by the autograd engine, of what `prepare` returns.
        compiler: `torch.compile` with its options and `fullgraph=True`.
        recover: is told why the graph cannot be used, and returns the step to take instead from then on, of what
            `prepare` returns.
        reduce: turns losses into the one to minimise and the values to log.
        sync: averages gradients over the processes; None in one process.
        updates_inside: whether the optimizer's step is part of the graph; else it runs after it.
        tolerance: by which relative norm all of the graph's gradients together may differ from eager ones; None trusts
            the compiler.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], Losses],
        prepare: Callable[[Any], Any],
        model: nn.Module,
        optim: OptimWrapper,
        eager: Step,
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]],
        recover: Callable[[Exception], Step],
        reduce: Callable[[Losses], tuple[Tensor, dict[str, Tensor]]] | None = None,
        sync: GradientSync | None = None,
        updates_inside: bool = True,
        tolerance: float | None = 0.2,
    ) -> None:
        self.loss_of, self.prepare, self.reduce = loss_of, prepare, reduce or sum_losses
        self.model, self.optim, self.sync = model, optim, sync
        self.eager, self.compiler, self.recover = eager, compiler, recover
        self.updates_inside, self.tolerance = updates_inside, tolerance
        self._average: Average | None = None
        self._instead: Step | None = None
        self._shapes = Shapes()
        self._made: Captured | None = None
        self._changes = 0
        self._loaded = optim.optimizer.register_load_state_dict_post_hook(lambda _: self._forget())

    def adopt_average(
        self, averages: list[Tensor], currents: list[Tensor], share: Callable[[], float]
    ) -> None:
        """From now on end each step with averages += share() * (currents - averages)."""
        self._average = Average(averages, currents, share)
        self._forget()

    def _forget(self) -> None:
        self._made = None

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        if self._average is not None:
            self._average.count()
        inputs = self.prepare(batch)
        if self._instead is None:
            if self.sync is None and not self._shapes.worth_a_graph(inputs):
                return self._eagerly(self.eager, inputs)
            try:
                return self._with_graph(inputs)
            except (*CAPTURE_ERRORS, NotCapturedError, WrongNumbersError) as error:
                self._instead = self.recover(error)
                self._forget()
        return self._eagerly(self._instead, inputs)

    # ---- the step --------------------------------------------------------------------------------------

    def _define(self, graph: Captured) -> Callable[..., Outputs]:
        """Return the step as a function for the compiler."""
        optim, loss_of, reduce = self.optim, self.loss_of, self.reduce
        sync, average = self.sync, self._average
        params, update, scale, window = graph.params, graph.update, graph.scale, graph.window
        clip, guard = optim.clip_grad, optim.guard

        def step(inputs: Any, held: list[Tensor] | None, ends: bool) -> Outputs:
            """Train on `inputs`; `held` are the gradients of the accumulation window so far, if there are windows."""
            with optim.autocast():
                losses = loss_of(inputs)
            loss, logs = reduce(losses)
            sound = torch.isfinite(loss.detach())
            if held is not None:
                loss = loss / window.tensor
            if scale is not None:
                loss = loss * scale.scale
            grads: list[Tensor] = list(torch.autograd.grad(loss, params))
            if guard is not None:  # a mean over nothing is NaN without any gradient
                grads[0] = torch.where(sound, grads[0], torch.nan)
            finite = None
            with torch.no_grad():
                if held is not None:
                    grads = list(torch._foreach_add(held, grads))
                if ends and sync is not None:
                    grads = sync(grads)
                if ends and update is not None:
                    if scale is not None:
                        grads = scale.unscale(grads)
                    if scale is not None or guard is not None:
                        finite = all_finite(grads)
                    if clip is not None:
                        grads, norm = clip.clipped(grads)
                        logs = logs if norm is None else {**logs, "grad_norm": norm}
                    moved = [*params, *update.state] if finite is not None else []
                    before = [tensor.clone() for tensor in moved]
                    update(grads)
                    if finite is not None:
                        keep_unless(finite, moved, before)
                        if scale is not None:
                            scale.adapt(finite)
                    grads = []
                if average is not None and not (ends and update is None):
                    average.take()
            return logs, grads, finite

        # Torch counts the graphs of a code object: each step has its own.
        step.__code__ = step.__code__.replace()
        return step

    # ---- around it -------------------------------------------------------------------------------------

    def _with_graph(self, inputs: Any) -> dict[str, Tensor]:
        ends = self.optim.should_sync()
        graph = self._made
        if graph is None or ends not in graph.proven or not graph.fits():
            return self._prove(inputs, ends)
        try:
            return self._train(graph, inputs, ends)
        except CAPTURE_ERRORS:  # another shape, or something else that a graph depends on: one more graph
            if self.sync is None:  # which parameters get a gradient may depend on it, too
                return self._prove(inputs, ends)
        return self._train_or_send(graph, inputs, ends, self.recover)[0]

    def _train_or_send(
        self, graph: Captured, inputs: Any, ends: bool, tell: Callable[[Exception], Any]
    ) -> tuple[dict[str, Tensor], Exception | None]:
        """Make and run a graph; if that fails, `tell` why, and run the step uncompiled from now on.

        Other ranks may have made it: they wait for what the uncompiled step sends just as theirs do.
        """
        try:
            return self._train(graph, inputs, ends, tracing=True), None
        except CAPTURE_ERRORS as error:
            tell(error)
            graph.run = self._define(graph)
            return self._train(graph, inputs, ends), error

    def _train(self, graph: Captured, inputs: Any, ends: bool, tracing: bool = False) -> dict[str, Tensor]:
        """Run the graph, and the optimizer if it is not part of it."""
        optim = self.optim
        held = graph.held() if optim.accumulative_counts > 1 else None
        graph.window.set(optim.window)
        if optim.guard is not None:
            optim.guard.before_forward()
        run = partial(_traced, graph.run) if tracing else graph.run
        logs, grads, finite = run(inputs, held, ends)
        optim.count_batch()
        if held is not None or grads:
            for param, grad in zip(graph.params, grads or [None] * len(graph.params), strict=True):
                param.grad = grad
        if ends and graph.update is None:
            self._update_outside()
        elif ends:
            optim.grad_norm = logs.get("grad_norm")
            if optim.guard is not None and finite is not None:
                optim.guard.settle(finite)
        if optim.grad_norm is not None:
            logs["grad_norm"] = optim.grad_norm
        return logs

    def _update_outside(self) -> None:
        optim = self.optim
        if optim.guard is None:
            optim.step()
        else:
            optim.guard.step(optim)
        optim.zero_grad()
        if self._average is not None:
            self._average.take_now()

    def _eagerly(self, step: Step, inputs: Any) -> dict[str, Tensor]:
        logs = step(inputs)
        if self._average is not None:
            self._average.take_now()
        return logs

    def _prove(self, inputs: Any, ends: bool) -> dict[str, Tensor]:
        """Train on a batch eagerly, go back, train on it with the graph, and compare.

        Raises:
            WrongNumbersError: the gradients differ; everything is as it was before.
        """
        device = next(self.optim.parameters()).device
        averages = self._average.averages if self._average is not None else []
        scale = LossScale.of(self.optim, device)
        saved = Snapshot(self.model, self.optim, [*averages, *(scale.state if scale else ())])
        devices = [] if device.type == "cpu" else [device]
        drawn = random_state(device)
        fork = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
        with fork, seen_gradients(self.optim.parameters()) as seen:
            self.eager(inputs)
        expected = evidence(saved.params, self.optim, saved, ends)
        saved.restore()
        graph = self._graph_for([param for param in self.optim.parameters() if param in seen])
        failure = None
        try:
            if self.sync is None:
                logs = self._train(graph, inputs, ends, tracing=True)
            else:
                logs, failure = self._train_or_send(graph, inputs, ends, lambda _: None)
        except CAPTURE_ERRORS:  # optimizer state was made already
            saved.restore()
            raise
        says, wrong = True, ""
        if self.tolerance is not None:
            found = evidence(saved.params, self.optim, saved, ends)
            says, wrong = compare(expected, found, self.tolerance)
        verdict = [failure is not None, bool(wrong), not says]
        failed, differs, silent = verdict if self.sync is None else self.sync.any_rank(verdict, device)
        if failed or differs:
            saved.restore()
            drawn()
            self._forget()
            if failed:
                raise failure or NotCapturedError("another rank could not capture it")
            raise WrongNumbersError(wrong or "on another rank")
        if not silent:  # an overflow of the loss scale skips the step, and shows nothing
            graph.proven.add(ends)
        return logs

    def _graph_for(self, params: list[nn.Parameter]) -> Captured:
        """Return the graph that trains `params`, a new one if there is none or it no longer fits.

        Raises:
            NotCapturedError: there were too many new ones.
        """
        graph = self._made
        if graph is not None and graph.fits() and graph.trains(params):
            return graph
        self._changes += 1
        if self._changes > _GRAPHS:
            raise NotCapturedError(
                f"which parameters are trained, or how they are grouped, changed {self._changes} times"
            )
        graph = self._made = Captured(self.optim, params, self.updates_inside)
        graph.run = self.compiler(self._define(graph))
        return graph


def _traced(run: Callable[..., Any], *args: Any) -> Any:
    """Call a compiled step whose graph may have to be made: that needs switches of torch which take long to turn."""
    # A number that a module counts up in forward would otherwise mean a new graph at every step.
    with torch._dynamo.config.patch(trace_autograd_ops=True, allow_unspec_int_on_nn_module=True):
        return run(*args)
