"""The training step as one compiled graph.

The graph contains the forward pass, loss, backward pass, gradient sync, clipping, optimizer update and weight
averaging. `GraphStep._define` defines the step, which updates weights, buffers, optimizer state, loss scale and
averages in place. Checkpoints, validation and the eager step therefore use the same tensors.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from slipstream.step.captured import CapturedStep, Shapes, check_batch
from slipstream.step.direct import DirectCalls
from slipstream.step.dynamo import (
    capture_config,
    check_random,
    check_traced,
    has_side_effects,
    needs_autograd_engine,
    prepare_graph,
)
from slipstream.step.eager import (
    BackwardPasses,
    CompiledStep,
    EagerStep,
    observe_backward,
    sum_losses,
)
from slipstream.step.function import GraphFunction, Losses, Outputs
from slipstream.step.parts import has_gradients, trained_params
from slipstream.step.sync import GradientSync
from slipstream.step.update import infer_trained
from slipstream.step.verification import (
    CompiledGraph,
    NotCapturedError,
    Verification,
    VerificationNeeded,
    WrongNumbersError,
)

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import CapturedCalls

__all__ = ["GraphStep"]

_MAX_REBUILDS = 8
"""Maximum number of times that the graph may be invalidated; the same as torch's recompile limit."""
_MAX_SETTING_CHANGES = 2
"""After this many changes to settings that graphs treat as constants, the optimizer runs outside the graph."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class _StepCall(NamedTuple):
    """A call to the compiled step."""

    outputs: Outputs
    grad_buffers: list[Tensor] | None
    """The gradients of the accumulation window, which the call changes in place."""
    args: tuple[Any, Any, bool] | None = None
    """The arguments of a call through Dynamo, from which `DirectCalls` constructs a direct call."""


class GraphStep(CompiledStep):
    """The training step as one compiled graph, with an eager step as fallback.

    The eager step runs on the first batch, to determine which parameters receive a gradient and to create the
    optimizer's state. On the second batch, the step is captured and compiled. The graph is then verified on copies of
    all its inputs, while the eager step trains on the original inputs. The compiled code runs on all later batches.
    Each new graph is verified in the same way. The verification therefore does not run the user's Python code a second
    time, and a failure before the end of the verification has no side effects.

    On a single rank, the eager step also runs on batches whose shape differs from that of the first batch, until these
    batches are frequent enough to justify a graph with dynamic shapes. With several ranks, every shape uses a graph:
    the ranks' batches may differ in shape, but all ranks must take the same path. If one rank cannot capture the step,
    all ranks run the step eagerly.

    Args:
        loss_of: `loss_of(inputs) -> losses` for inputs on the device; must be traceable and call the unwrapped model.
        prepare: `prepare(batch) -> inputs`, operations before the graph (transfer, normalization); runs under autocast.
        model: the unwrapped model.
        optim: the optimizer wrapper, with loss scale, accumulation and clipping.
        eager: the eager step; its `train` receives the result of `prepare`.
        backend: a backend of `torch.compile`.
        recover: called if the graph cannot be used, with the exception and the reason why the model alone cannot be
            compiled (None if it can); returns the step to use instead, whose `train` receives the result of `prepare`.
        reduce: returns the loss to minimize and the values to log; by default, `sum_losses`.
        sync: averages gradients across processes; None for a single process.
        verify: whether to compare graphs with the eager step before their first use.
        dynamic: whether shapes may vary; None detects varying shapes automatically.
        capture_calls: creates the object that captures and replays calls as CUDA graphs; None disables CUDA graphs.
        info: called with messages to log, for example when the graph is first used.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], Losses],
        prepare: Callable[[Any], Any],
        model: nn.Module,
        optim: OptimWrapper,
        eager: EagerStep,
        backend: Backend,
        recover: Callable[[Exception, str | None], EagerStep],
        reduce: Callable[[Losses], tuple[Tensor, dict[str, Tensor]]] | None = None,
        sync: GradientSync | None = None,
        verify: bool = True,
        dynamic: bool | None = None,
        capture_calls: Callable[[], CapturedCalls] | None = None,
        info: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.loss_of, self.prepare, self.reduce = loss_of, prepare, reduce or sum_losses
        self.model, self.optim, self.sync = model, optim, sync
        self.eager, self.backend, self.recover = eager, backend, recover
        self.verify, self.dynamic = verify, dynamic
        self.capture_calls, self.info = capture_calls, info
        self.batches = 0
        self._backward_passes = BackwardPasses()  # of the last eager batch before a fallback
        self._fallback: EagerStep | None = None
        self._shapes = Shapes()
        self._rebuilds = self._setting_changes = 0
        self._trained: list[nn.Parameter] = []
        self._inferred = self._started = False
        self._step: CapturedStep | None = None
        self._failed: tuple[Exception, list[nn.Parameter]] | None = None

    def close(self) -> None:
        """Drop the compiled code; later batches run eagerly."""
        self._fallback = self._fallback or self.eager
        self._reset()

    @property
    def uses_graph(self) -> bool:
        """Whether the step uses a graph, either now or once the graph has been compiled and verified."""
        return self._fallback is None

    @property
    def has_graph(self) -> bool:
        """Whether the step has a compiled and verified graph, which it uses for batches of the same shape."""
        return self.uses_graph and self._step is not None and (bool(self._step.verified) or not self.verify)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        for part in self.optim.parts:
            part.before_batch()
        with self.optim.autocast():
            inputs = self.prepare(batch)
        if self._fallback is not None:
            return self._fallback.train(inputs)
        if self.sync is None and not self._shapes.should_use_graph(inputs):
            return self.eager.train(inputs)
        if self._step is not None:
            changed = self._step.find_change()
        else:
            changed = None if all(p.requires_grad for p in self._trained) else "a parameter's requires_grad"
        if changed is not None:
            self._rebuilds += 1
            if self._step is not None and changed in self.optim.optimizer.param_groups[0]:
                self._setting_changes += 1
            self._reset()
            if self._rebuilds > _MAX_REBUILDS:
                why = f"its graph was invalidated {self._rebuilds} times; last change: {changed}"
                return self._fall_back(NotCapturedError(f"{why}; avoid such changes"), inputs)
        if self._step is None and not self._trained:
            if not self._started and self.optim.batches > 0:
                self._infer_trained()
            if not self._trained:
                self._started = True
                return self._train_and_record(inputs)
        if self.sync is None and needs_autograd_engine():
            return self.eager.train(inputs)
        optim = self.optim
        if (
            optim.accumulative_counts == 1
            and not optim.overrides_zero_grad
            and has_gradients(optim.parameters())
        ):
            # Train eagerly, because this update includes gradients that the user has set.
            return self.eager.train(inputs)
        return self._train(inputs)

    # ---- the step --------------------------------------------------------------------------------------

    def _define(self, captured: CapturedStep, compiled: bool = True) -> Callable[..., Outputs]:
        """Return the function to compile. If `compiled` is true, calling it outside Dynamo raises an error."""
        window = captured.window if captured.adds_gradients else None
        function = GraphFunction(
            self.loss_of,
            self.reduce,
            self.optim,
            captured.params,
            window,
            captured.scale,
            captured.update,
            self.sync,
        )

        def step(inputs: Any, grad_buffers: list[Tensor] | None, ends_window: bool) -> Outputs:
            if compiled:
                check_traced()
            return function(inputs, grad_buffers, ends_window)

        # PyTorch counts recompiles per code object, so give each step its own code object.
        step.__code__ = step.__code__.replace()
        return step

    # ---- run the step ----------------------------------------------------------------------------------

    def _call(self, captured: CapturedStep, inputs: Any, ends_window: bool) -> _StepCall:
        """Call the compiled step."""
        optim = self.optim
        grad_buffers = captured.grad_buffers()
        captured.window.set(optim.accumulation.size)
        arguments = (inputs, grad_buffers, ends_window)
        call = captured.direct.find(*arguments) if captured.direct is not None else None
        if captured.last_compiled is not None:
            captured.last_compiled.running = False
        captured.uses[ends_window] += 1
        if call is not None:
            captured.last_compiled = call.compiled
            tensors = call.tensors_read(inputs, grad_buffers)
            graphs = captured.cuda_graphs if call.one_device else None
            return _StepCall(call.run(tensors) if graphs is None else graphs(call.run, tensors), grad_buffers)
        if grad_buffers is not None and not captured.adds_gradients:
            torch._foreach_zero_(grad_buffers)  # the verification reads the initial values
        check_batch(inputs)
        try:
            with capture_config():
                outputs = captured.run(*arguments)
        except VerificationNeeded as outcome:
            outcome.grad_buffers = grad_buffers or []
            raise
        return _StepCall(outputs, grad_buffers, arguments)

    def _finish(self, captured: CapturedStep, called: _StepCall, ends_window: bool) -> dict[str, Tensor]:
        """Run the operations that are not part of the compiled step, and return the values to log."""
        optim, grad_buffers = self.optim, called.grad_buffers
        if called.args is not None and captured.direct is not None and captured.last_compiled is not None:
            call = captured.direct.add_call(captured.last_compiled, called.args, called.outputs)
            if captured.cuda_graphs is not None and (call is None or not call.one_device):
                captured.cuda_graphs = None
                self.info(
                    "The step is not replayed as a CUDA graph, because it changes Python objects, reads tensors on the "
                    "CPU, or reads tensors that belong to neither the batch nor the model"
                )
        logs, finite = called.outputs
        self.batches += 1
        optim.accumulation.advance()
        if grad_buffers is not None:
            for param, grad in zip(captured.params, grad_buffers, strict=True):
                param.grad = grad
        outside = ends_window and captured.update is None
        if outside:
            optim.step()
            optim.zero_grad()
            logs.update(optim.logs)
        elif ends_window:
            if grad_buffers is not None:
                optim.zero_grad()
            for part in captured.parts:
                part.after_window(finite)
        for part in captured.parts:
            if outside or part.on_host:
                part.after_batch()
            part.count_batch()
        return logs

    def _train_and_record(self, inputs: Any) -> dict[str, Tensor]:
        """Train eagerly, and record which parameters receive a gradient.

        If these are the same parameters as in a failed capture, do not capture the step again.
        """
        optim = self.optim

        def record() -> None:
            self._trained = trained_params(optim.parameters())

        failed, self._failed = self._failed, None  # cleared first, in case the user's code raises an error
        with observe_backward(self.model) as self._backward_passes:
            logs = self.eager.train(inputs, on_gradients=record)
        if failed is not None and not self._trained:
            self._failed = failed  # postpone the comparison until the accumulation window ends
        elif failed is not None and list(map(id, failed[1])) == list(map(id, self._trained)):
            self._replace(failed[0])
        return logs

    def _train(self, inputs: Any) -> dict[str, Tensor]:
        """Train with the graph for this kind of batch; if there is none, capture and verify one first."""
        ends_window = self.optim.should_sync()
        captured = self._step
        try:
            if captured is None:
                captured = self._capture()
            called = self._call(captured, inputs, ends_window)
        except VerificationNeeded as outcome:
            assert captured is not None
            return self._train_and_verify(captured, outcome, inputs, ends_window)
        except Exception as error:
            if captured is None:
                return self._fall_back(error, inputs)
            if captured.last_compiled is not None and captured.last_compiled.running:
                raise  # the code failed while running and may have changed tensors
            if self.sync is None:
                if not captured.has_graphs or NotCapturedError.find_in(error) is not None:
                    return self._fall_back(error, inputs)
                self._reset()  # the model may have taken a different branch, with different parameters
                self._failed, self._started = (error, captured.params), True
                return self._train_and_record(inputs)
            if self.verify and ends_window not in captured.verified:
                return self._train_and_verify(captured, error, inputs, ends_window)
            # The other ranks run their graph and wait for this rank, so run the uncompiled step, which performs the
            # same collectives.
            self.recover(error, self._backward_passes.problem)
            captured.run, captured.direct = self._define(captured, compiled=False), None
            called = self._call(captured, inputs, ends_window)
        return self._finish(captured, called, ends_window)

    def _capture(self) -> CapturedStep:
        """Create the state that the graphs share; each graph is compiled on its first call.

        Raises:
            NotCapturedError: the model has hooks that a graph does not support.
        """
        captured = CapturedStep(
            self.model, self.optim, self._trained, self._setting_changes < _MAX_SETTING_CHANGES
        )
        captured.check_hooks()
        captured.function = self._define(captured)

        # Use weak references, because torch never releases a backend.
        own, shared = weakref.ref(self), weakref.ref(captured)

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            step, captured = own(), shared()
            assert step is not None
            assert captured is not None
            return step._compile(captured, graph, inputs)

        captured.run = torch.compile(captured.function, fullgraph=True, backend=backend, dynamic=self.dynamic)
        captured.direct = DirectCalls(captured.function, self.model, captured.own_tensors())
        captured.cuda_graphs = None if self.capture_calls is None else self.capture_calls()
        self._step = captured
        return captured

    def _compile(
        self, captured: CapturedStep, graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile a graph captured by Dynamo; the code runs only after its verification."""
        ends_window = self.optim.should_sync()
        captured.count_graph(ends_window)
        check_random()
        added = prepare_graph(graph)
        # Once all ranks have a verified graph, a single rank cannot verify a new graph, because the other ranks would
        # not participate.
        verified = not self.verify or (self.sync is not None and ends_window in captured.verified)
        started = time.monotonic()
        compiled = CompiledGraph(
            graph, _without_last(self.backend(graph, inputs), added), verified, has_side_effects()
        )
        self.info(f"{type(self.model).__name__}: compiled the step in {time.monotonic() - started:.1f} s")

        def run(*args: Any) -> Any:
            captured.last_compiled = compiled
            return compiled(*args)

        return run

    def _train_and_verify(
        self, captured: CapturedStep, outcome: VerificationNeeded | Exception, inputs: Any, ends_window: bool
    ) -> dict[str, Tensor]:
        """Train on a batch eagerly, and compare the results with those of the graph, which runs on copies."""
        failure = None if isinstance(outcome, VerificationNeeded) else outcome
        if isinstance(outcome, VerificationNeeded) and captured.direct is not None:
            captured.direct.store_guards(outcome.compiled)
        verification = None
        if not any(self._any_rank(failure is not None)) and isinstance(outcome, VerificationNeeded):
            try:
                captured.check_hooks()
                verification = Verification(outcome, captured.params[0].device, captured.names())
            except Exception as error:
                failure = error
        if any(self._any_rank(verification is None)):
            failure = failure or NotCapturedError("another rank cannot capture the step")
            return self._fall_back(failure, inputs)
        assert isinstance(outcome, VerificationNeeded)
        assert verification is not None
        outside, unread = ends_window and captured.update is None, captured.unread_tensors(outcome.inputs)
        grad_buffers = dict(zip(map(id, outcome.grad_buffers), captured.params, strict=False))
        ignored = captured.ids_changed_later() if outside else set(grad_buffers) if ends_window else set()
        known = list(map(id, captured.params))

        def compare() -> None:
            # If the model took a different branch, capture the step with that branch's parameters.
            ids = list(map(id, trained if ends_window else trained_params(self.optim.parameters())))
            if self.sync is None and (ids and ids != known if ends_window else not set(ids).issubset(known)):
                self._reset()
                self._trained = trained
                return
            gradients = {key: param.grad for key, param in grad_buffers.items() if param.grad is not None}
            results = {} if ignored.issuperset(grad_buffers) else gradients
            self._accept_if_equal(captured, outcome, verification, results, ignored, unread, ends_window)

        trained: list[nn.Parameter] = []

        def record() -> None:
            trained.extend(trained_params(self.optim.parameters()))
            if outside:
                compare()

        logs = self.eager.train(inputs, outside, record)
        if not outside:
            compare()
            # Call these parts after `compare`, because it may replace the weights with the graph's results.
            for part in self.optim.parts:
                if part.on_host:
                    part.after_batch()
        return logs

    def _accept_if_equal(
        self,
        captured: CapturedStep,
        outcome: VerificationNeeded,
        verification: Verification,
        results: dict[int, Tensor],
        ignored: set[int],
        unread: list[tuple[str, Tensor, int]],
        ends_window: bool,
    ) -> None:
        """Compare the results of the graph and the eager step, and accept the graph if they agree."""
        failure, no_update = None, False
        try:
            for name, tensor, version in unread:
                if tensor._version != version:
                    raise WrongNumbersError(f"only the eager step changes {name}", compiler=False)
            no_update = not verification.compare(results, captured.updated_ids() | set(results), ignored)
        except WrongNumbersError as error:
            failure = error
        differs, unclear = self._any_rank(failure is not None, no_update)
        if differs:
            self._replace(failure or WrongNumbersError("on another rank", compiler=False))
        elif not unclear:
            verification.copy_results(results, ignored)
            outcome.compiled.verified = True
            self._inferred = False
            if ends_window not in captured.verified:
                captured.verified.add(ends_window)
                first = self.optim.batches + 1
                self.info(f"{type(self.model).__name__}: the step runs as one graph from batch {first} on")

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        if self.sync is None:
            return list(flags)
        return self.sync.any_rank(flags, next(self.optim.parameters()).device)

    # ---- invalidate the graph ----------------------------------------------------------------------------

    def _reset(self) -> None:
        if self._step is not None:  # torch does not release a function's compiled code automatically
            torch._C._dynamo.eval_frame.reset_code(self._step.function.__code__)
        self._step, self._trained, self._inferred = None, [], False

    def _infer_trained(self) -> None:
        """Infer the trained parameters from a loaded optimizer state, so that a resumed run starts with a graph."""
        self._reset()
        trained = infer_trained(self.optim.optimizer, self.optim.parameters())
        if trained is not None:
            self._trained, self._inferred = trained, True

    def _replace(self, error: Exception) -> None:
        self._fallback = self.recover(error, self._backward_passes.problem)
        self._reset()

    def _fall_back(self, error: Exception, inputs: Any) -> dict[str, Tensor]:
        """Train on a batch eagerly; from the next batch on, use the step that `recover` returns."""
        if self._inferred:
            self._reset()
            return self._train_and_record(inputs)
        with observe_backward(self.model) as self._backward_passes:
            logs = self.eager.train(inputs)  # if the user's code raises an error, the step is not replaced
        self._replace(error)
        return logs


def _without_last(run: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function that calls `run` and drops the last `count` outputs."""
    return (lambda *args: run(*args)[:-count]) if count else run
