"""One training step as one compiled graph: forward, loss, backward, gradient sync, clipping, optimizer, average.

`GraphStep._define` below is the step, top to bottom. Everything it changes (weights, buffers, optimizer state, loss
scale, averages) are the very tensors that the module, the optimizer and the others hold, changed in place: a
checkpoint, a validation or an eager step finds the same state, whichever step ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from slipstream.step.background import BackgroundCompiler
from slipstream.step.captured import CapturedStep, Shapes, shapes
from slipstream.step.direct import DirectCalls, Outputs
from slipstream.step.dynamo import has_side_effects, refuse_python_random, tracing
from slipstream.step.eager import EagerStep, Losses, sum_losses
from slipstream.step.leaves import leaves_of
from slipstream.step.numerics import all_finite, only_if
from slipstream.step.parts import apply_update, has_gradients
from slipstream.step.sync import GradientSync
from slipstream.step.update import is_stateless
from slipstream.step.verification import (
    Captured,
    Compiled,
    NotCapturedError,
    OnlyEagerError,
    Verification,
    WrongNumbersError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slipstream.optim.optim_wrapper import OptimWrapper
    from slipstream.step.cuda_graph import RecordedCalls

__all__ = ["GraphStep"]

_REBUILDS = 8
"""As often may what a graph depends on change, as torch may recompile a function."""
_SETTING_CHANGES = 2
"""After as many changes of settings that the graph holds fixed the optimizer steps after the graph."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class _Called(NamedTuple):
    """A call of the compiled step."""

    outputs: Outputs
    held: list[Tensor] | None
    """The gradients of the accumulation window, which the call has changed in place."""
    learn: tuple[Any, Any, bool] | None = None
    """The arguments of a call through Dynamo, from which a direct call is learned."""


class GraphStep:
    """The step as one graph, of a model whose step the autograd engine could also run.

    The first batch is trained by `eager`, which shows the parameters that get a gradient and makes the optimizer's
    state. The second is captured, compiled and verified on copies of everything the graph reads, and trained by `eager`
    once more; from then on the compiled code trains. A new graph is verified in the same way. So the user's Python code
    runs exactly as often as without compilation, and whatever fails until then leaves no trace.

    Batches of another shape than the first are trained by `eager`, until they are many enough to pay for a graph with
    variable shapes. Several ranks take the same path at every step: what one of them cannot capture, none uses, and
    batches of any shape go into graphs, since another rank's may have the first shape.

    Args:
        loss_of: `loss_of(inputs) -> losses` for inputs on the device; calls the bare model, and is traceable.
        prepare: `prepare(batch) -> inputs`, what is done outside the graph: transfer, normalisation.
        model: the bare model.
        optim: holds the optimizer, and says how to scale, accumulate and clip.
        eager: the same training by the autograd engine, of what `prepare` returns.
        backend: the compiler, as `torch.compile` takes it.
        recover: is told why the graph cannot be used, and returns the step to take instead from then on, of what
            `prepare` returns.
        reduce: turns losses into the one to minimise and the values to log.
        sync: averages gradients over the processes; None in one process.
        verify: whether graphs are compared with the eager step before they train.
        dynamic: whether shapes may vary; None finds out.
        record: makes what records calls of the compiled step and replays them, as CUDA graphs.
        background: compiles while batches are trained eagerly; None lets the batches wait.
        say: is told from which batch on the graph is used, if that depends on `background`.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], Losses],
        prepare: Callable[[Any], Any],
        model: nn.Module,
        optim: OptimWrapper,
        eager: EagerStep,
        backend: Backend,
        recover: Callable[[Exception], EagerStep],
        reduce: Callable[[Losses], tuple[Tensor, dict[str, Tensor]]] | None = None,
        sync: GradientSync | None = None,
        verify: bool = True,
        dynamic: bool | None = None,
        record: Callable[[], RecordedCalls] | None = None,
        background: BackgroundCompiler | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.loss_of, self.prepare, self.reduce = loss_of, prepare, reduce or sum_losses
        self.model, self.optim, self.sync = model, optim, sync
        self.eager, self.backend, self.recover = eager, backend, recover
        self.verify, self.dynamic = verify, dynamic
        self.record, self.background, self.say = record, background, say
        self._instead: EagerStep | None = None
        self._shapes = Shapes()
        self._trained: list[nn.Parameter] = []
        self._guessed = self._started = False
        self._step: CapturedStep | None = None
        self._compiling: tuple[Any, ...] | None = None
        self._compiled_in: float | None = None
        self._rebuilds = self._setting_changes = 0
        guess = weakref.WeakMethod(self._guess)

        def loaded(_: Any) -> None:
            if (method := guess()) is not None:
                method()

        if hasattr(optim.optimizer, "_optimizer_load_state_dict_post_hooks"):
            weakref.finalize(self, optim.optimizer.register_load_state_dict_post_hook(loaded).remove)

    def close(self) -> None:
        """Drop the compiled code; further batches are trained eagerly."""
        self._instead = self._instead or self.eager
        self._forget()

    def pause(self) -> None:
        """End a compilation in the background; it starts again with the next batch."""
        self._compiling = None
        if self.background is not None:
            self.background.stop()

    @property
    def captured(self) -> bool:
        """Whether the step is one graph, or will be."""
        return self._instead is None

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch."""
        for part in self.optim.parts:
            part.before_batch()
        inputs = self.prepare(batch)
        if self._instead is not None:
            return self._instead.train(inputs)
        if self.sync is None and not self._shapes.worth_a_graph(inputs):
            return self.eager.train(inputs)
        if self._step is not None:
            changed = self._step.why_not()
        else:
            changed = None if all(p.requires_grad for p in self._trained) else "requires_grad of parameters"
        if changed is not None:
            self._count_change(changed)
            if self._rebuilds > _REBUILDS:
                error = NotCapturedError(f"{changed} changed {self._rebuilds} times")
                return self._give_up(error, inputs)
        if self._step is None and not self._trained:
            if self._started or self.optim.batches == 0:
                self._started = True
                return self._observe(inputs)
            self._guess()
        if self.sync is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return self.eager.train(inputs)  # hooks of saved tensors apply to the autograd engine
        if has_gradients(self.optim.parameters()):
            if self.optim.accumulative_counts == 1:
                # The user has put gradients there, which belong to this update.
                return self.eager.train(inputs)
            self.optim.check_gradients()
        return self._train(inputs)

    # ---- the step --------------------------------------------------------------------------------------

    def _define(self, captured: CapturedStep, compiled: bool = True) -> Callable[..., Outputs]:
        """Return the step as a function, which refuses to run otherwise than compiled if it is for the compiler."""
        optim, loss_of, reduce, sync = self.optim, self.loss_of, self.reduce, self.sync
        params, update, scale, window = captured.params, captured.update, captured.scale, captured.window
        parts, guard, windows = captured.parts, optim.guard, optim.accumulative_counts > 1
        repeats = next((part for part in parts if part.replaces_gradients), None)

        def gradients(inputs: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
            with optim.autocast():
                losses = loss_of(inputs)
            loss, logs = reduce(losses)
            sound = torch.isfinite(loss.detach())
            if windows:
                loss = loss / window.read()
            if scale is not None:
                loss = loss * scale.scale
            grads = list(torch.autograd.grad(loss, params))
            if guard is not None:  # a mean over nothing is NaN without any gradient
                grads[0] = torch.where(sound, grads[0], torch.nan)
            return grads, logs

        def synced(inputs: Any) -> list[Tensor]:
            grads, _ = gradients(inputs)
            return grads if sync is None else sync(grads)

        def step(inputs: Any, held: list[Tensor] | None, ends: bool) -> Outputs:
            """Train on `inputs`; `held` are the gradients of the accumulation window so far, changed in place."""
            if compiled and not torch.compiler.is_dynamo_compiling():  # Dynamo has skipped the function
                raise NotCapturedError(
                    "torch.compile is switched off, or a TorchDispatchMode keeps it from compiling"
                )
            grads, logs = gradients(inputs)
            if repeats is not None:
                first = grads if sync is None else sync(grads)
                grads = repeats.gradients(params, lambda: synced(inputs), first)
            finite = None
            with torch.no_grad():
                if windows and held is not None:
                    grads = list(torch._foreach_add(held, grads))
                if ends and sync is not None and repeats is None:
                    grads = sync(grads)
                if ends and update is not None:
                    if scale is not None:
                        grads = scale.unscale(grads)
                    if scale is not None or guard is not None:
                        finite = all_finite(grads)
                    guarded = update if finite is None else only_if(finite, update, [*params, *update.state])
                    logs = {**logs, **apply_update(parts, params, grads, guarded)}
                    if scale is not None and finite is not None:
                        scale.adapt(finite)
                elif held is not None:
                    torch._foreach_copy_(held, grads)
                if not ends or update is not None:
                    for part in parts:
                        if not part.on_host:
                            part.after_batch()
            return logs, finite

        # Torch counts the graphs of a code object: each step has its own.
        step.__code__ = step.__code__.replace()
        return step

    # ---- around it -------------------------------------------------------------------------------------

    def _call(self, captured: CapturedStep, inputs: Any, ends: bool) -> _Called | None:
        """Call the compiled step; None if it is still being compiled."""
        optim = self.optim
        held = captured.held()
        captured.window.set(optim.window)
        arguments = (inputs, held, ends)
        call = captured.direct.find(*arguments) if captured.direct is not None else None
        if call is None and self._compiles_elsewhere(captured, inputs, ends):
            return None
        if optim.guard is not None:
            optim.guard.before_forward()
        if captured.running is not None:
            captured.running.running = False
        captured.count_batch(ends)
        if call is not None:
            captured.running = call.compiled
            return _Called(
                call(arguments) if captured.recorded is None else captured.recorded(call, arguments), held
            )
        if held is not None and optim.accumulative_counts == 1:
            torch._foreach_zero_(held)  # the verification measures gradients by how far they are from these
        _check_batch(inputs)
        try:
            with tracing():
                outputs = captured.run(*arguments)
        except Captured as found:
            found.held = held or []
            raise
        return _Called(outputs, held, arguments)

    def _finish(self, captured: CapturedStep, called: _Called, ends: bool) -> dict[str, Tensor]:
        """Do on the host what is not part of the compiled step; return what to log."""
        optim, held = self.optim, called.held
        if called.learn is not None and captured.direct is not None and captured.running is not None:
            known = captured.direct.learn(captured.running, called.learn, called.outputs)
            if not known and captured.recorded is not None and not captured.said:
                captured.said = True
                self.say(
                    "The step is not replayed as a CUDA graph: it changes Python objects, or reads tensors that are "
                    "neither in the batch nor in the model"
                )
        logs, finite = called.outputs
        optim.count_batch()
        if held is not None:
            for param, grad in zip(captured.params, held, strict=True):
                param.grad = grad
        if not ends:
            optim.claim_gradients()
        outside = ends and captured.update is None
        if outside:
            optim.update()
            logs.update(optim.logs)
        elif ends:
            if held is not None:
                optim.zero_grad()
            optim.grad_norm = logs.get("grad_norm")
            if optim.guard is not None and finite is not None:
                optim.guard.settle(finite)
        for part in captured.parts:
            if outside or part.on_host:
                part.after_batch()
        if optim.grad_norm is not None:
            logs["grad_norm"] = optim.grad_norm
        return logs

    def _observe(self, inputs: Any) -> dict[str, Tensor]:
        """Train eagerly, and remember which parameters got a gradient."""
        optim = self.optim

        def seen() -> None:
            self._trained = _with_gradients(optim)

        with self._on_gradients(seen):
            return self.eager.train(inputs)

    @contextmanager
    def _on_gradients(self, call: Callable[[], None]) -> Iterator[None]:
        self.optim.on_gradients = call
        try:
            yield
        finally:
            self.optim.on_gradients = None

    def _train(self, inputs: Any) -> dict[str, Tensor]:
        """Train by the graph, which is captured and verified first if there is none for this kind of batch."""
        ends = self.optim.should_sync()
        captured = self._step
        try:
            if captured is None:
                captured = self._capture()
            called = self._call(captured, inputs, ends)
        except Captured as found:
            assert captured is not None
            return self._verified(captured, found, inputs, ends)
        except Exception as error:
            if captured is not None and captured.running is not None and captured.running.running:
                raise  # the code itself failed, as the eager step would have, and may have changed tensors
            if (
                self.sync is None
                and captured is not None
                and captured.has_graphs
                and NotCapturedError.inside(error) is None
            ):
                self._forget()  # another branch of the model may train other parameters: see which
                return self._observe(inputs)
            if self.sync is None or captured is None:
                return self._give_up(error, inputs)
            if self.verify and ends not in captured.agreed:
                return self._verified(captured, error, inputs, ends)
            # Other ranks run their graph and wait for what this one sends: the same step, not compiled, sends it too.
            self.recover(error)
            captured.run, captured.direct = self._define(captured, compiled=False), None
            called = self._call(captured, inputs, ends)
        return self.eager.train(inputs) if called is None else self._finish(captured, called, ends)

    def _compiles_elsewhere(self, captured: CapturedStep, inputs: Any, ends: bool) -> bool:
        """Return whether the graph for such a batch is being compiled in the background, which is started if need be.

        Several ranks wait for the last one. What another rank's shapes need it compiles on its own, as in `_compile`.
        """
        if self.background is None:
            return False
        # One graph of variable shapes serves all batches that are not shaped as the first.
        of_shape = shapes(inputs) if self.dynamic is False and self.sync is None else [self._shapes.varies]
        kind = (ends, *of_shape)
        if kind in captured.kinds:
            return False
        if self._compiling is not None:
            if any(self._agree(not self.background.done())):
                return True
            captured.kinds.add(self._compiling)
            self._compiled_in = self.background.seconds
            if self._compiled_in is None:
                self.say(
                    "Compilation in the background failed: the step is compiled now, while training waits"
                )
            if not self.verify:
                self._say_switch()
        if kind in captured.kinds:
            self._compiling = None
            return False
        self._compiling = kind
        with suppress(OSError):  # without a process to do it in, compilation is done at the next batch
            self.background.start(partial(self._only_compile, captured, inputs, ends))
        return True

    def _only_compile(self, captured: CapturedStep, inputs: Any, ends: bool) -> None:
        """Compile for such a batch, in a copy of this process."""
        self.background, captured.only_compiles = None, True
        with suppress(Captured):
            self._call(captured, inputs, ends)

    def _say_switch(self) -> None:
        if self._compiled_in is not None:
            first, seconds = self.optim.batches + 1, self._compiled_in
            self.say(
                f"The step is one graph from batch {first} on (compiled in the background in {seconds:.0f} s)"
            )
            self._compiled_in = None

    def _capture(self) -> CapturedStep:
        """Return what the graphs share; they are made at the first call.

        Raises:
            NotCapturedError: hooks forbid it.
        """
        inside = self._setting_changes < _SETTING_CHANGES
        captured = CapturedStep(self.model, self.optim, self._trained, inside)
        captured.check_hooks()
        captured.check_params()
        captured.function = self._define(captured)

        own, shared = weakref.ref(self), weakref.ref(captured)  # torch keeps every backend it was given

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            step, captured = own(), shared()
            assert step is not None
            assert captured is not None
            return step._compile(captured, graph, inputs)

        run = torch.compile(captured.function, fullgraph=True, backend=backend, dynamic=self.dynamic)
        captured.run = run
        captured.direct = DirectCalls(captured.function, self.model, captured.own_tensors())
        captured.recorded = None if self.record is None else self.record()
        self._step = captured
        return captured

    def _compile(
        self, captured: CapturedStep, graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Compile a graph that Dynamo has captured; the code runs once it is verified."""
        ends = self.optim.should_sync()
        captured.count_graph(ends)
        refuse_python_random()
        # Once all ranks have a graph, one that needs another cannot verify it: the others would wait in vain.
        trusted = not self.verify or (self.sync is not None and ends in captured.agreed)
        made = Compiled(graph, self.backend(graph, inputs), trusted, has_side_effects())

        def run(*args: Any) -> Any:
            if captured.only_compiles:
                raise Captured(made, args)
            captured.running = made
            return made(*args)

        return run

    def _verified(
        self, captured: CapturedStep, found: Captured | Exception, inputs: Any, ends: bool
    ) -> dict[str, Tensor]:
        """Train on a batch eagerly, and compare with what the graph computes of it on copies."""
        failure = None if isinstance(found, Captured) else found
        if isinstance(found, Captured) and captured.direct is not None:
            captured.direct.note(found.compiled)
        verification = None
        if not any(self._agree(failure is not None)) and isinstance(found, Captured):
            try:
                captured.check_hooks()
                device = captured.params[0].device
                verification = Verification(found, device, captured.names())
            except Exception as error:
                failure = error
        if any(self._agree(failure is not None or verification is None)):
            return self._give_up(failure or NotCapturedError("another rank could not capture it"), inputs)
        assert isinstance(found, Captured)
        assert verification is not None
        outside, unseen = ends and captured.update is None, self._unseen(captured, found)
        held = dict(zip(map(id, found.held), captured.params, strict=False))
        ignored = captured.after_graph() if outside else set(held) if ends else set()

        known = list(map(id, captured.params))

        def settle() -> None:
            # Another branch of the model was taken: capture it with the parameters it trains.
            if self.sync is None and ends and trained and list(map(id, trained)) != known:
                self._forget()
                self._trained = trained
                return
            if (
                self.sync is None
                and not ends
                and not set(map(id, _with_gradients(self.optim))).issubset(known)
            ):
                self._forget()
                return
            gradients = {key: param.grad for key, param in held.items() if param.grad is not None}
            results = {} if ignored.issuperset(held) else gradients
            self._settle(captured, found, verification, results, ignored, unseen, ends)

        trained: list[nn.Parameter] = []

        def seen() -> None:
            trained.extend(_with_gradients(self.optim))
            if outside:
                settle()

        with self._on_gradients(seen):
            logs = self.eager.train(inputs)
        if not outside:
            settle()
        return logs

    def _settle(
        self,
        captured: CapturedStep,
        found: Captured,
        verification: Verification,
        results: dict[int, Tensor],
        ignored: set[int],
        unseen: list[tuple[str, Tensor, int]],
        ends: bool,
    ) -> None:
        """Compare the graph's results with those of the eager step, and use the graph from now on if they agree."""
        failure, silent = None, False
        try:
            for name, tensor, version in unseen:
                if tensor._version != version:
                    raise WrongNumbersError(f"{name} is changed by the eager step alone", compiler=False)
            silent = not verification.compare(results, captured.updated() | set(results), ignored)
        except WrongNumbersError as error:
            failure = error
        differs, unclear = self._agree(failure is not None, silent)
        if differs:
            self._stop(failure or WrongNumbersError("on another rank", compiler=False))
        elif not unclear:
            verification.take(results, ignored)
            found.compiled.verified = True
            self._guessed = False
            captured.agreed.add(ends)
            self._say_switch()

    def _unseen(self, captured: CapturedStep, found: Captured) -> list[tuple[str, Tensor, int]]:
        """Return the buffers and, if the update is inside, state tensors that the graph does not read."""
        known = {id(value) for value in found.inputs}
        names = captured.names()
        tensors = list(self.model.buffers())
        if captured.update is not None:
            tensors += [t for values in self.optim.optimizer.state.values() for t in values.values()]
        return [
            (names.get(id(tensor), "a tensor"), tensor, tensor._version)
            for tensor in tensors
            if isinstance(tensor, Tensor) and id(tensor) not in known
        ]

    def _agree(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        if self.sync is None:
            return list(flags)
        return self.sync.any_rank(flags, next(self.optim.parameters()).device)

    # ---- what changes ------------------------------------------------------------------------------------

    def _count_change(self, changed: str) -> None:
        """Forget the graph because of what has changed; settings that change often move the update out of it."""
        self._rebuilds += 1
        if (
            self._step is not None
            and self._step.update is not None
            and changed in self._step.update.optimizer.param_groups[0]
        ):
            self._setting_changes += 1
        self._forget()

    def _forget(self) -> None:
        if self._step is not None:  # torch keeps the code of a function for as long as the process lasts
            torch._C._dynamo.eval_frame.reset_code(self._step.function.__code__)
        self.pause()
        self._step, self._trained, self._guessed = None, [], False

    def _guess(self) -> None:
        """Go on with a loaded training by the graph at once, so that it has the numbers of one that was not cut off.

        Parameters with a state were trained; of optimizers without state, all are taken to be.
        """
        self._forget()
        optimizer = self.optim.optimizer
        state = optimizer.state
        if not state and not is_stateless(optimizer):
            return  # it is about to make its first step, which may differ from the others
        params = [param for param in self.optim.parameters() if param.requires_grad]
        self._trained = [param for param in params if param in state] or params
        self._guessed = True

    def _stop(self, error: Exception) -> None:
        self._instead = self.recover(error)
        self._forget()

    def _give_up(self, error: Exception, inputs: Any) -> dict[str, Tensor]:
        """Train on a batch, and from now on, by the step that takes the place of this one."""
        if self._guessed:
            self._forget()
            return self._observe(inputs)
        # An error of the user's own is raised here, and the step stays as it is.
        logs = self.eager.train(inputs)
        self._stop(error)
        return logs


def _with_gradients(optim: OptimWrapper) -> list[nn.Parameter]:
    return [param for param in optim.parameters() if param.requires_grad and param.grad is not None]


def _check_batch(inputs: Any) -> None:
    """Refuse tensors of a subclass, which compilers take for plain ones, and those whose gradient is not computed.

    Raises:
        OnlyEagerError: the batch holds one.
    """
    for leaf in leaves_of(inputs):
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in (Tensor, nn.Parameter):
            raise OnlyEagerError(f"the batch holds tensors of the class {type(leaf).__name__}")
        if leaf.is_nested:
            raise OnlyEagerError("the batch holds a nested tensor")
        if leaf.requires_grad:
            raise OnlyEagerError("the batch holds a tensor that requires a gradient")
