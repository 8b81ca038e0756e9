"""The training step as one compiled graph.

The graph contains the forward pass, loss, backward pass, gradient sync, clipping, optimizer update and weight
averaging (`GraphFunction`). It updates weights, buffers, optimizer state, loss scale and averages in place.
Checkpoints, validation and the eager step therefore use the same tensors.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from slipstream.step.captured import Arguments, Capture, DirectCalls, Shapes, check_batch
from slipstream.step.dynamo import (
    capture_config,
    check_random,
    check_traced,
    needed_guards,
    prepare_step_graph,
    side_effects,
)
from slipstream.step.function import CompiledStep, EagerStep, GradBuffers, GraphFunction, LossOf, Outputs
from slipstream.step.leaves import flatten
from slipstream.step.parts import trained_params
from slipstream.step.sync import GradientSync, any_rank
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

# Maximum number of times that the graph may be invalidated; the same as torch's recompile limit.
_MAX_REBUILDS = 8
# After this many changes to settings that graphs treat as constants, the optimizer runs outside the graph.
_MAX_SETTING_CHANGES = 2

_NUMBERS = count(1)

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class Phase(Enum):
    """The phases of a compiled step. Only `GraphStep._enter` changes the phase.

    - RECORD: train eagerly until an update has created the optimizer's state, and record the parameters with a
      gradient.
    - CAPTURE: the trained parameters are known; capture the step with the next batch.
    - RUN: the step is captured. Each new graph is compiled, verified with one batch, and runs from the next batch on.
    - EAGER: train eagerly, because the step could not be captured, is too expensive to compile, or computes wrong
      numbers.
    """

    RECORD = auto()
    CAPTURE = auto()
    RUN = auto()
    EAGER = auto()


@dataclass(eq=False)
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

    loss_of: LossOf
    model: nn.Module
    optim: OptimWrapper
    eager: EagerStep
    backend: Backend
    recover: Callable[[Exception], object]
    sync: GradientSync | None = None
    verify: bool = True
    dynamic: bool | None = None
    cuda_graphs: Callable[[], CudaGraphs] | None = None
    info: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.batches = 0
        self.phase = Phase.RECORD
        self._captured: Capture | None = None  # set in phase RUN
        self._trained: list[nn.Parameter] = []  # set in phases CAPTURE and RUN
        self._infers = True  # whether the trained parameters may be inferred from a loaded optimizer state
        # Why the last graph was dropped, and the parameters with which the step could not be captured (None for all).
        self._dropped: tuple[Exception, list[nn.Parameter] | None] | None = None
        self._shapes = Shapes()
        self._rebuilds = self._setting_changes = 0

    def _enter(
        self, phase: Phase, trained: Sequence[nn.Parameter] = (), captured: Capture | None = None
    ) -> None:
        """Change the phase, and drop the compiled code."""
        if self._captured is not None:  # torch does not release a function's compiled code automatically
            torch._C._dynamo.eval_frame.reset_code(self._captured.step.__code__)
        self.phase, self._trained, self._captured = phase, list(trained), captured

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
        if change is not None:
            return self._train_after_change(change, inputs)
        if self.phase is Phase.RECORD and not self._infer_trained():
            return self._train_and_record(inputs)
        # Train eagerly if anomaly detection or saved-tensor hooks are active, or if the update includes gradients that
        # the user has set.
        uses_engine = torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True)
        has_grad = any(p.grad is not None for group in optim.optimizer.param_groups for p in group["params"])
        adds = optim.accumulation.counts > 1 or optim.overrides_zero_grad
        if (self.sync is None and uses_engine) or (has_grad and not adds):
            return self.eager.train(inputs)
        return self._run(inputs, leaves, structure)

    def _run(self, inputs: Any, leaves: list[Any], structure: Any) -> dict[str, Tensor]:
        """Train with a graph, if one accepts this batch."""
        window = self.optim.accumulation
        ends_window = window.counts == 1 or window.ends_next
        try:
            captured = self._captured or self._capture()
        except Exception as error:  # the step has hooks or settings that a graph does not support
            return self._train_after_failure(error, inputs)
        grad_buffers = captured.grad_buffers() if captured.keeps_gradients else None
        if captured.adds_gradients:
            captured.window.set(window.size)
        captured.uses[ends_window] += 1
        leaves = leaves if grad_buffers is None else [*leaves, *grad_buffers]
        arguments = inputs, grad_buffers, ends_window
        call = captured.direct.find(arguments, leaves, structure)
        if call is None:
            return self._run_with_dynamo(captured, arguments)
        tensors = [leaves[leaf] for _, leaf in call.positions]
        graphs = captured.cuda_graphs if call.one_device else None
        outputs = call.run(tensors) if graphs is None else graphs(call.run, tensors)
        return self._finish(captured, outputs, grad_buffers, ends_window)

    def _finish(
        self, captured: Capture, outputs: Outputs, grad_buffers: GradBuffers, ends_window: bool
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
            optim.finish()
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
        if not self._infers or not self.optim.batches:
            return False
        trained = infer_trained(self.optim.optimizer, self.optim.parameters())
        if trained:
            self._enter(Phase.CAPTURE, trained)
        return bool(trained)

    def _train_and_record(self, inputs: Any) -> dict[str, Tensor]:
        """Train eagerly, and record which parameters receive a gradient.

        The step stays eager if it could not be captured with these parameters, or if too many graphs were dropped.
        """
        optim, trained = self.optim, list[nn.Parameter]()
        dropped, self._dropped = self._dropped, None  # cleared first, in case the user's code raises an error
        self._infers = False
        logs = self.eager.train(
            inputs, on_gradients=lambda: trained.extend(trained_params(optim.parameters()))
        )
        self._rebuilds += dropped is not None and bool(trained)
        if not trained:
            self._dropped = dropped  # wait for the end of the accumulation window
        elif dropped is not None and (
            self._rebuilds > _MAX_REBUILDS
            or dropped[1] is None
            or list(map(id, dropped[1])) == list(map(id, trained))
        ):
            self._stop(dropped[0])
        elif not can_trace(optim.optimizer) or has_state(optim.optimizer, trained):
            self._enter(Phase.CAPTURE, trained)
        return logs

    # ---- capture and compile ----------------------------------------------------------------------------

    def _capture(self) -> Capture:
        """Create the state that the graphs share; each graph is compiled on its first call."""
        inside = self._setting_changes < _MAX_SETTING_CHANGES
        captured = Capture(self.model, self.optim, self._trained, inside)
        captured.check_hooks()
        function = GraphFunction(self.loss_of, captured, self.sync)

        def step(inputs: Any, grad_buffers: GradBuffers, ends_window: bool) -> Outputs:
            check_traced()
            return function.run(inputs, grad_buffers, ends_window)

        # PyTorch counts recompiles per code object, and makes a size dynamic if it differs from the size in another
        # function with the same name and line, so give each step its own code object and name.
        step.__code__ = step.__code__.replace(co_name=f"step_{next(_NUMBERS)}")
        own = weakref.proxy(self)  # torch never releases a backend
        captured.step, captured.uncompiled = step, function.run
        captured.run = torch.compile(
            step, fullgraph=True, backend=lambda graph, args: own._compile(graph, args), dynamic=self.dynamic,
            options={"guard_filter_fn": needed_guards},
        )  # fmt: skip
        captured.direct = DirectCalls(step, self.model, captured.own_tensors())
        captured.cuda_graphs = None if self.cuda_graphs is None else self.cuda_graphs()
        self._enter(Phase.RUN, captured.params, captured)
        return captured

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph captured by Dynamo; the code runs only after its verification."""
        captured, ends_window = self._captured, self.optim.accumulation.ends_next
        assert captured is not None
        captured.count_graph(ends_window)
        check_random()
        added, effects = prepare_step_graph(graph), side_effects()
        is_alone = self.verify and self.sync is not None and ends_window in captured.verified
        if is_alone and effects is None:
            raise NotCapturedError(
                "a changed Python object needs another graph, which one rank alone cannot verify"
            )
        started = time.monotonic()
        run = self.backend(graph, inputs)
        code = GraphCode(
            graph, (lambda *args: run(*args)[:-added]) if added else run, not self.verify, effects
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

    def _run_with_dynamo(self, captured: Capture, arguments: Arguments) -> dict[str, Tensor]:
        """Train with the graph for this kind of batch; if there is none, capture and verify one first."""
        inputs, grad_buffers, ends_window = arguments
        if self._shapes.varies and self._shapes.failed:
            return self.eager.train(inputs)
        if grad_buffers is not None and not captured.adds_gradients:
            torch._foreach_zero_(grad_buffers)  # the verification reads the initial values
        if captured.last_code is not None:
            captured.last_code.running = False
        try:
            check_batch(inputs)
            with capture_config():
                outputs = captured.run(*arguments)
        except VerificationNeeded as needed:
            needed.grad_buffers = grad_buffers or []
            captured.direct.store_guards(needed.code)
            return self._train_and_verify(captured, needed, inputs, ends_window)
        except Exception as error:
            if captured.last_code is not None and captured.last_code.running:
                raise  # the code failed while running and may have changed tensors
            if self.sync is None or (self.verify and ends_window not in captured.verified):
                return self._train_and_verify(captured, error, inputs, ends_window)
            # The other ranks run their graph and wait for this rank, so run the uncompiled step, which performs the
            # same collectives.
            self.recover(error)
            captured.run, captured.last_code = captured.uncompiled, None
            outputs = captured.run(*arguments)
        code = captured.last_code
        call = None if code is None else captured.direct.add_call(code, arguments, outputs)
        if captured.cuda_graphs is not None and (call is None or not call.one_device):
            captured.cuda_graphs = None
            self.info(
                "The step is not replayed as a CUDA graph, because it changes Python objects, reads tensors on the "
                "CPU, or reads tensors that belong to neither the batch nor the model"
            )
        return self._finish(captured, outputs, grad_buffers, ends_window)

    # ---- verify -----------------------------------------------------------------------------------------

    def _train_and_verify(
        self, captured: Capture, outcome: VerificationNeeded | Exception, inputs: Any, ends_window: bool
    ) -> dict[str, Tensor]:
        """Train on a batch eagerly, and compare the results with those of the graph, which runs on copies.

        Args:
            outcome: the graph and its inputs, or the reason why the step could not be captured.
        """
        needed = outcome if isinstance(outcome, VerificationNeeded) else None
        failure, verification = outcome if isinstance(outcome, Exception) else None, None
        if not any(self._any_rank(needed is None)) and needed is not None:
            try:
                captured.check_hooks()
                verification = captured.start_verification(needed, ends_window)
            except Exception as error:
                failure = error
        if any(self._any_rank(verification is None)) or needed is None or verification is None:
            failure = failure or NotCapturedError("another rank cannot capture the step")
            return self._train_after_failure(failure, inputs)
        outside, unread = ends_window and captured.update is None, captured.unread_tensors(needed.inputs)
        trained: list[nn.Parameter] = []

        def compare() -> None:
            # If the model took a different branch, capture the step with that branch's parameters.
            known, ids = (list(map(id, params)) for params in (captured.params, trained))
            if self.sync is None and (ids and ids != known if ends_window else not set(ids).issubset(known)):
                self._enter(Phase.CAPTURE if ends_window else Phase.RECORD, trained if ends_window else ())
                return
            self._accept_if_equal(captured, needed, verification, unread, ends_window)

        def record() -> None:
            trained.extend(trained_params(self.optim.parameters()))
            if outside:
                compare()

        logs = self.eager.train(inputs, outside, record)
        if not outside:
            if not ends_window:
                record()
            compare()
            # Call these parts after `compare`, because it may replace the weights with the graph's results.
            for part in self.optim.parts:
                if part.on_host:
                    part.after_batch()
        return logs

    def _accept_if_equal(
        self,
        captured: Capture,
        needed: VerificationNeeded,
        verification: Verification,
        unread: list[tuple[str, Tensor, int]],
        ends_window: bool,
    ) -> None:
        """Compare the results of the graph and the eager step, and accept the graph if they agree."""
        failure, no_update, code = None, False, needed.code
        grad_buffers = dict(zip(map(id, needed.grad_buffers), captured.params, strict=False))
        # An update in the graph clears the gradients of the window.
        cleared = set(grad_buffers) if ends_window and captured.update is not None else set()
        results = {
            key: param.grad
            for key, param in grad_buffers.items()
            if key not in cleared and param.grad is not None
        }
        try:
            for name, tensor, version in unread:
                if tensor._version != version:
                    raise WrongNumbersError(f"only the eager step changes {name}", compiler=False)
            no_update = not verification.compare(results, {*map(id, captured.updated()), *results}, cleared)
        except WrongNumbersError as error:
            failure = error
        # Python objects that the step changes may require another graph for the next batch.
        may_change = self.sync is not None and code.effects != [] and code not in captured.accepted
        differs, unclear, continues = self._any_rank(failure is not None, no_update, may_change)
        if differs:
            failure = failure or WrongNumbersError("on another rank", compiler=False)
            if not self._keep_verified(failure):
                self._stop(failure)
        elif not unclear:
            verification.copy_results(results, cleared)
            captured.accepted.add(code)
            code.verified = not continues
            self._infers = False
            if code.verified and ends_window not in captured.verified:
                captured.verified.add(ends_window)
                first = self.optim.batches + 1
                self.info(f"{type(self.model).__name__}: the step runs as one graph from batch {first} on")

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        if self.sync is None:
            return list(flags)
        return any_rank(flags, next(self.optim.parameters()).device)

    # ---- failures ---------------------------------------------------------------------------------------

    def _train_after_change(self, change: str, inputs: Any) -> dict[str, Tensor]:
        """Train on a batch eagerly after a change that invalidates the graph."""
        self._setting_changes += change in self.optim.optimizer.param_groups[0]
        times = f"{self._rebuilds + 1} times; last change: {change}"
        self._dropped = NotCapturedError(f"its graph was invalidated {times}; avoid such changes"), []
        self._enter(Phase.RECORD)
        return self._train_and_record(inputs)

    def _train_after_failure(self, error: Exception, inputs: Any) -> dict[str, Tensor]:
        """Train on a batch eagerly after a graph could not be captured, compiled or verified."""
        if self._keep_verified(error):
            return self.eager.train(inputs)
        # The model may have taken a branch with other parameters. If even the first batch of recorded parameters has no
        # graph, stop: branches that alternate would otherwise need a graph each time.
        is_final = not self._infers and (self._captured is None or not self._captured.has_graphs)
        self._dropped = error, None if is_final else self._trained
        self._enter(Phase.RECORD)
        return self._train_and_record(inputs)

    def _keep_verified(self, error: Exception) -> bool:
        """Return whether graphs for other shapes remain in use, and this shape runs eagerly from now on."""
        shapes, captured = self._shapes, self._captured
        if self.sync is not None or not shapes.varies or captured is None or not captured.verified:
            return False
        if not shapes.failed:
            name = type(error).__name__
            self.info(
                f"Only batches with known shapes use the graph; the graph for other shapes failed ({name}: {error})"
            )
        shapes.failed = True
        return True

    def _stop(self, error: Exception) -> None:
        """Train eagerly from now on."""
        self.recover(error)
        self._enter(Phase.EAGER)
