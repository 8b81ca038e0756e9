"""The training step as one compiled graph.

The graph contains the forward pass, loss, backward pass, gradient sync, clipping, optimizer update and weight
averaging (`GraphFunction`). It updates weights, buffers, optimizer state, loss scale and averages in place.
Checkpoints, validation and the eager step therefore use the same tensors.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from slipstream.step.captured import Capture, DirectCalls, Shapes, check_batch
from slipstream.step.dynamo import (
    capture_config,
    check_random,
    check_traced,
    prepare_step_graph,
    side_effects,
)
from slipstream.step.function import CompiledStep, EagerStep, GraphFunction, LossOf, Outputs
from slipstream.step.leaves import flatten
from slipstream.step.parts import trained_params
from slipstream.step.sync import GradientSync
from slipstream.step.update import can_trace, has_state, infer_trained
from slipstream.step.verification import (
    GraphCode,
    NotCapturedError,
    Verification,
    VerificationNeeded,
    WrongNumbersError,
)

if TYPE_CHECKING:
    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import CudaGraphs

__all__ = ["GraphStep", "Phase"]

_MAX_REBUILDS = 8
"""Maximum number of times that the graph may be invalidated; the same as torch's recompile limit."""
_MAX_SETTING_CHANGES = 2
"""After this many changes to settings that graphs treat as constants, the optimizer runs outside the graph."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Phase(Enum):
    """The phases of a compiled step. Only `GraphStep._enter` changes the phase."""

    RECORD = auto()
    """Train eagerly until an update has created the optimizer's state, and record the parameters with a gradient."""
    CAPTURE = auto()
    """The trained parameters are known; capture the step with the next batch."""
    RUN = auto()
    """The step is captured. Each new graph is compiled, verified with one batch, and runs from the next batch on."""
    EAGER = auto()
    """Train eagerly, because the step could not be captured, is too expensive to compile, or computes wrong numbers."""


class GraphStep(CompiledStep):
    """The training step as one compiled graph, with an eager step as fallback; see `Phase`.

    A graph is verified on copies of all its inputs, while the eager step trains on the original inputs. The
    verification therefore does not run the user's Python code a second time, and a failure before the end of the
    verification has no side effects.

    On a single rank, the eager step also runs on batches whose shape differs from that of the first batch, until these
    batches are frequent enough to justify a graph with dynamic shapes. If such a graph fails, these batches run
    eagerly. With several ranks, every shape uses a graph: the ranks' batches may differ in shape, but all ranks must
    take the same path. If one rank cannot capture the step, all ranks run the step eagerly.

    Args:
        loss_of: returns the loss to minimize and the values to log; must be traceable and call the unwrapped model.
        model: the unwrapped model.
        optim: the optimizer wrapper, with loss scale, accumulation and clipping.
        eager: the eager step, whose `prepare` runs before the graph.
        backend: a backend of `torch.compile`.
        recover: called before the step becomes eager, with the exception.
        sync: averages gradients across processes; None for a single process.
        verify: whether to compare graphs with the eager step before their first use.
        dynamic: whether shapes may vary; None detects varying shapes automatically.
        cuda_graphs: creates the object that captures and replays calls as CUDA graphs; None disables CUDA graphs.
        info: called with messages to log, for example when the graph is first used.
    """

    def __init__(
        self,
        loss_of: LossOf,
        model: nn.Module,
        optim: OptimWrapper,
        eager: EagerStep,
        backend: Backend,
        recover: Callable[[Exception], object],
        sync: GradientSync | None = None,
        verify: bool = True,
        dynamic: bool | None = None,
        cuda_graphs: Callable[[], CudaGraphs] | None = None,
        info: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.loss_of, self.model, self.optim, self.sync = loss_of, model, optim, sync
        self.eager, self.backend, self.recover = eager, backend, recover
        self.verify, self.dynamic = verify, dynamic
        self.cuda_graphs, self.info = cuda_graphs, info
        self.batches = 0
        self.phase = Phase.RECORD
        self._captured: Capture | None = None  # set in phase RUN
        self._trained: list[nn.Parameter] = []  # set in phases CAPTURE and RUN
        self._inferred = False  # whether the trained parameters were inferred from a loaded optimizer state
        self._first = True  # whether no batch has been recorded
        self._failed: tuple[Exception, list[nn.Parameter]] | None = None  # a graph of a branch of the model
        self._shapes = Shapes()
        self._rebuilds = self._setting_changes = 0

    def _enter(self, phase: Phase, trained: Sequence[nn.Parameter] = (), inferred: bool = False) -> None:
        """Change the phase. Unless the new phase is RUN, drop the compiled code."""
        self.phase = phase
        if phase is not Phase.RUN:
            if self._captured is not None:  # torch does not release a function's compiled code automatically
                torch._C._dynamo.eval_frame.reset_code(self._captured.function.__code__)
            self._captured, self._trained, self._inferred = None, list(trained), inferred

    def close(self) -> None:
        """Drop the compiled code; later batches run eagerly."""
        self._enter(Phase.EAGER)

    @property
    def uses_graph(self) -> bool:
        """Whether the step uses a graph, either now or once the graph has been compiled and verified."""
        return self.phase is not Phase.EAGER

    @property
    def has_graph(self) -> bool:
        """Whether the step has a compiled and verified graph, which it uses for batches of the same shape."""
        return self._captured is not None and (bool(self._captured.verified) or not self.verify)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        optim, captured = self.optim, self._captured
        inputs = self.eager.prepare(batch)
        if self.phase is Phase.EAGER:
            return self.eager.train(inputs)
        leaves, structure = flatten(inputs)
        if self.sync is None and not self._shapes.should_use_graph(leaves):
            return self.eager.train(inputs)
        if captured is not None:
            change = captured.find_change()
        else:
            change = None if all(p.requires_grad for p in self._trained) else "a parameter's requires_grad"
        if change is not None and (error := self._invalidate(change)) is not None:
            return self._train_and_stop(error, inputs)
        if self.phase is Phase.RECORD and not self._infer_trained():
            return self._train_and_record(inputs)
        # Train eagerly if anomaly detection or saved-tensor hooks are active, or if the update includes gradients that
        # the user has set.
        uses_engine = torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True)
        if (self.sync is None and uses_engine) or (
            optim.accumulation.counts == 1
            and not optim.overrides_zero_grad
            and any(p.grad is not None for group in optim.optimizer.param_groups for p in group["params"])
        ):
            return self.eager.train(inputs)
        return self._run(inputs, leaves, structure)

    def _run(self, inputs: Any, leaves: list[Any], structure: Any) -> dict[str, Tensor]:
        """Train with a graph, if one accepts this batch."""
        window = self.optim.accumulation
        ends_window = window.counts == 1 or window.ends_next
        captured = self._captured or self._capture()
        if not isinstance(captured, Capture):
            return self._train_after_failure(None, captured, inputs)
        grad_buffers = captured.grad_buffers() if captured.keeps_gradients else None
        if captured.adds_gradients:
            captured.window.set(self.optim.accumulation.size)
        captured.uses[ends_window] += 1
        call = None
        if captured.direct is not None:
            leaves = leaves if grad_buffers is None else [*leaves, *grad_buffers]
            call = captured.direct.find(inputs, grad_buffers, ends_window, leaves, structure)
        if call is None:
            return self._run_with_dynamo(captured, inputs, grad_buffers, ends_window)
        tensors = [leaves[leaf] for _, leaf in call.positions]
        graphs = captured.cuda_graphs if call.one_device else None
        outputs = call.run(tensors) if graphs is None else graphs(call.run, tensors)
        return self._finish(captured, outputs, grad_buffers, ends_window)

    def _finish(
        self, captured: Capture, outputs: Outputs, grad_buffers: list[Tensor] | None, ends_window: bool
    ) -> dict[str, Tensor]:
        """Run the operations that are not part of the compiled step, and return the values to log."""
        optim, (logs, finite) = self.optim, outputs
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
            optim.logs = logs
            for part in captured.parts:
                if "after_window" in part.implements:
                    part.after_window(finite)
        for part in captured.parts:
            if "after_batch" in part.implements and (outside or part.on_host):
                part.after_batch()
            if "count_batch" in part.implements:
                part.count_batch()
        if (norm := optim.logs.get("grad_norm")) is not None:
            logs["grad_norm"] = norm
        return logs

    # ---- record -----------------------------------------------------------------------------------------

    def _infer_trained(self) -> bool:
        """Infer the trained parameters from a loaded optimizer state, so that a resumed run starts with a graph."""
        trained = infer_trained(self.optim.optimizer, self.optim.parameters())
        if not self._first or not self.optim.batches or not trained:
            return False
        self._enter(Phase.CAPTURE, trained, inferred=True)
        return True

    def _train_and_record(self, inputs: Any) -> dict[str, Tensor]:
        """Train eagerly, and record which parameters receive a gradient.

        If these are the same parameters as in a failed capture, do not capture the step again.
        """
        optim, trained = self.optim, list[nn.Parameter]()
        failed, self._failed = self._failed, None  # cleared first, in case the user's code raises an error
        self._first = False
        logs = self.eager.train(
            inputs, on_gradients=lambda: trained.extend(trained_params(optim.parameters()))
        )
        if not trained:
            self._failed = failed  # postpone the comparison until the accumulation window ends
        elif failed is not None and list(map(id, failed[1])) == list(map(id, trained)):
            self._stop(failed[0])
        elif not can_trace(optim.optimizer) or has_state(optim.optimizer, trained):
            self._enter(Phase.CAPTURE, trained)
        return logs

    # ---- capture and compile ----------------------------------------------------------------------------

    def _define(self, captured: Capture, compiled: bool = True) -> Callable[..., Outputs]:
        """Return the function to compile. If `compiled` is true, calling it outside Dynamo raises an error."""
        window = captured.window if captured.adds_gradients else None
        function = GraphFunction(
            self.loss_of,
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
            return function.run(inputs, grad_buffers, ends_window)

        # PyTorch counts recompiles per code object, so give each step its own code object.
        step.__code__ = step.__code__.replace()
        return step

    def _capture(self) -> Capture | Exception:
        """Create the state that the graphs share; each graph is compiled on its first call.

        Returns:
            The capture, or an exception if the step has hooks or settings that a graph does not support.
        """
        try:
            captured = Capture(
                self.model, self.optim, self._trained, self._setting_changes < _MAX_SETTING_CHANGES
            )
            captured.check_hooks()
        except Exception as error:
            return error
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
        captured.cuda_graphs = None if self.cuda_graphs is None else self.cuda_graphs()
        self._captured = captured
        self._enter(Phase.RUN)
        return captured

    def _compile(self, captured: Capture, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph captured by Dynamo; the code runs only after its verification."""
        ends_window = self.optim.accumulation.ends_next
        captured.count_graph(ends_window)
        check_random()
        added = prepare_step_graph(graph)
        if (
            self.verify
            and self.sync is not None
            and ends_window in captured.verified
            and side_effects() is None
        ):
            raise NotCapturedError(
                "a changed Python object needs another graph, which one rank alone cannot verify"
            )
        started = time.monotonic()
        run = self.backend(graph, inputs)
        code = GraphCode(
            graph, (lambda *args: run(*args)[:-added]) if added else run, not self.verify, side_effects()
        )
        self.info(f"{type(self.model).__name__}: compiled the step in {time.monotonic() - started:.1f} s")

        def call(*args: Any) -> Any:
            captured.last_code = code
            # Once all ranks have a verified graph, one rank cannot verify another without the others.
            code.verified |= self.sync is not None and ends_window in captured.verified
            if not code.verified:
                captured.check_inputs(args)
            return code(*args)

        return call

    def _run_with_dynamo(
        self, captured: Capture, inputs: Any, grad_buffers: list[Tensor] | None, ends_window: bool
    ) -> dict[str, Tensor]:
        """Train with the graph for this kind of batch; if there is none, capture and verify one first."""
        if self._shapes.varies and self._shapes.failed:
            return self.eager.train(inputs)
        if grad_buffers is not None and not captured.adds_gradients:
            torch._foreach_zero_(grad_buffers)  # the verification reads the initial values
        arguments = (inputs, grad_buffers, ends_window)
        if captured.last_code is not None:
            captured.last_code.running = False
        try:
            check_batch(inputs)
            with capture_config():
                outputs = captured.run(*arguments)
        except VerificationNeeded as outcome:
            outcome.grad_buffers = grad_buffers or []
            return self._train_and_verify(captured, outcome, inputs, ends_window)
        except Exception as error:
            if captured.last_code is not None and captured.last_code.running:
                raise  # the code failed while running and may have changed tensors
            if self.sync is None:
                return self._train_after_failure(captured, error, inputs)
            if self.verify and ends_window not in captured.verified:
                return self._train_and_verify(captured, error, inputs, ends_window)
            # The other ranks run their graph and wait for this rank, so run the uncompiled step, which performs the
            # same collectives.
            self.recover(error)
            captured.run, captured.direct = self._define(captured, compiled=False), None
            outputs = captured.run(*arguments)
        self._add_direct_call(captured, arguments, outputs)
        return self._finish(captured, outputs, grad_buffers, ends_window)

    def _add_direct_call(self, captured: Capture, arguments: Any, outputs: Outputs) -> None:
        """Let later batches call the code without Dynamo."""
        if captured.direct is None or captured.last_code is None:
            return
        call = captured.direct.add_call(captured.last_code, arguments, outputs)
        if captured.cuda_graphs is not None and (call is None or not call.one_device):
            captured.cuda_graphs = None
            self.info(
                "The step is not replayed as a CUDA graph, because it changes Python objects, reads tensors on the "
                "CPU, or reads tensors that belong to neither the batch nor the model"
            )

    # ---- verify -----------------------------------------------------------------------------------------

    def _train_and_verify(
        self, captured: Capture, outcome: VerificationNeeded | Exception, inputs: Any, ends_window: bool
    ) -> dict[str, Tensor]:
        """Train on a batch eagerly, and compare the results with those of the graph, which runs on copies."""
        failure = None if isinstance(outcome, VerificationNeeded) else outcome
        if isinstance(outcome, VerificationNeeded) and captured.direct is not None:
            captured.direct.store_guards(outcome.code)
        verification = None
        if not any(self._any_rank(failure is not None)) and isinstance(outcome, VerificationNeeded):
            try:
                captured.check_hooks()
                verification = captured.start_verification(outcome, ends_window)
            except Exception as error:
                failure = error
        if any(self._any_rank(verification is None)):
            failure = failure or NotCapturedError("another rank cannot capture the step")
            return self._train_after_failure(captured, failure, inputs)
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
                self._enter(Phase.CAPTURE if trained else Phase.RECORD, trained)
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
        captured: Capture,
        outcome: VerificationNeeded,
        verification: Verification,
        results: dict[int, Tensor],
        ignored: set[int],
        unread: list[tuple[str, Tensor, int]],
        ends_window: bool,
    ) -> None:
        """Compare the results of the graph and the eager step, and accept the graph if they agree."""
        failure, no_update, code = None, False, outcome.code
        try:
            for name, tensor, version in unread:
                if tensor._version != version:
                    raise WrongNumbersError(f"only the eager step changes {name}", compiler=False)
            no_update = not verification.compare(results, captured.updated_ids() | set(results), ignored)
        except WrongNumbersError as error:
            failure = error
        # Python objects that the step changes may require another graph for the next batch.
        may_change = self.sync is not None and code.effects != [] and code not in captured.accepted
        differs, unclear, continues = self._any_rank(failure is not None, no_update, may_change)
        if differs:
            failure = failure or WrongNumbersError("on another rank", compiler=False)
            if not self._keep_verified(captured, failure):
                self._stop(failure)
        elif not unclear:
            verification.copy_results(results, ignored)
            captured.accepted.add(code)
            code.verified = not continues
            self._inferred = False
            if code.verified and ends_window not in captured.verified:
                captured.verified.add(ends_window)
                first = self.optim.batches + 1
                self.info(f"{type(self.model).__name__}: the step runs as one graph from batch {first} on")

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        if self.sync is None:
            return list(flags)
        return self.sync.any_rank(flags, next(self.optim.parameters()).device)

    # ---- failures ---------------------------------------------------------------------------------------

    def _invalidate(self, change: str) -> Exception | None:
        """Drop the graph after a change; return an error if there were too many changes."""
        self._rebuilds += 1
        if self._captured is not None and change in self.optim.optimizer.param_groups[0]:
            self._setting_changes += 1
        self._enter(Phase.RECORD)
        if self._rebuilds <= _MAX_REBUILDS:
            return None
        return NotCapturedError(
            f"its graph was invalidated {self._rebuilds} times; last change: {change}; avoid such changes"
        )

    def _train_after_failure(
        self, captured: Capture | None, error: Exception, inputs: Any
    ) -> dict[str, Tensor]:
        """Train on a batch eagerly after a graph could not be captured, compiled or verified."""
        if captured is not None and self._keep_verified(captured, error):
            return self.eager.train(inputs)
        if not self._inferred and (
            self.sync is not None
            or captured is None
            or not captured.has_graphs
            or NotCapturedError.find_in(error) is not None
            or isinstance(error, WrongNumbersError)
        ):
            return self._train_and_stop(error, inputs)
        if not self._inferred:  # the model may have taken a different branch, with different parameters
            self._failed = (error, self._trained)
        self._enter(Phase.RECORD)
        return self._train_and_record(inputs)

    def _keep_verified(self, captured: Capture, error: Exception) -> bool:
        """Return whether graphs for other shapes remain in use, and this shape runs eagerly from now on."""
        if self.sync is not None or not self._shapes.varies or not captured.verified:
            return False
        if not self._shapes.failed:
            name = type(error).__name__
            self.info(
                f"Only batches with known shapes use the graph; the graph for other shapes failed ({name}: {error})"
            )
        self._shapes.failed = True
        return True

    def _stop(self, error: Exception) -> None:
        self.recover(error)
        self._enter(Phase.EAGER)

    def _train_and_stop(self, error: Exception, inputs: Any) -> dict[str, Tensor]:
        """Train on a batch eagerly; the step remains eager."""
        logs = self.eager.train(inputs)  # if the user's code raises an error, the step is not replaced
        self._stop(error)
        return logs
