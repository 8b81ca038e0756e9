"""Compile a model's modules within a time limit, in a forked process if possible.

An inductor compilation cannot be interrupted safely, but a process can be killed. Therefore, a forked process compiles
the modules first and writes the code to torch's cache, from which the parent process loads it. Meanwhile, the modules
run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.step.background import BackgroundCompiler, can_fork

__all__ = ["BudgetedCall", "Switch"]


class Switch:
    """Determines whether a model's compiled modules run their compiled code.

    If a module runs inside `torch.utils.checkpoint`, its recomputation must use compiled code if and only if the
    forward pass did, because compiled and eager code save different tensors for the backward pass. The recomputation
    takes place after the call to the model has returned.
    """

    def __init__(self, on: bool) -> None:
        self.on: bool | None = on
        """Whether the current call to the model runs compiled code; None outside a call."""
        self.recompute_compiled = False
        """Whether the recomputation of modules inside a checkpoint runs compiled code."""
        self.only_existing = False
        """Whether inputs that require a new graph run eagerly."""
        self.saw_checkpoint = False
        """Whether a module has run eagerly inside a checkpoint."""

    def runs_compiled(self) -> bool:
        """Return whether the module that calls this method should run its compiled code."""
        if self.on:
            return True
        if not _is_in_checkpoint():
            return False
        if self.on is None:
            return self.recompute_compiled
        self.saw_checkpoint = True
        return False

    def stance(self) -> AbstractContextManager[Any]:
        """Return a context manager in which a module runs its compiled code; see `only_existing`."""
        return torch.compiler.set_stance("eager_on_recompile") if self.only_existing else nullcontext()


class BudgetedCall:
    """Calls a model that is compiled within a time limit, as a whole or in part.

    The modules run eagerly until their code is compiled. The code for training (calls with gradients) and the code for
    evaluation (calls without gradients) are compiled separately. If the forked process exceeds the limit, it is killed,
    and the modules keep running eagerly. In the parent process, the limit is checked between compilations: once the
    limit is exceeded, no more graphs are compiled, and inputs that require a new graph run eagerly.

    Args:
        model: the model.
        call: calls the model, with compiled code if `switch` is on.
        switch: turns the compiled code of the modules on and off.
        limit: the limit in seconds.
        wait: whether the model waits for the forked process instead of running eagerly.
        on_exceeded: `on_exceeded(training)` is called if the forked process exceeds the limit; `training` is True if
            it compiled for training, and False for evaluation.
        compiles_here: whether the parent process compiles graphs for inputs that the forked process has not compiled
            for. If not, these inputs run eagerly.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[..., Any],
        switch: Switch,
        limit: float,
        wait: bool,
        on_exceeded: Callable[[bool], None],
        compiles_here: bool = True,
    ) -> None:
        self._model, self._call, self._switch = model, call, switch
        self._limit, self._on_exceeded, self._compiles_here = limit, on_exceeded, compiles_here
        param = next(model.parameters(), None)
        forks = param is not None and can_fork(param.device.type)
        self._background = BackgroundCompiler(limit, wait) if forks else None
        self._compiling: bool | None = None
        self._ready: set[bool] = set()
        self._given_up: set[bool] = set()
        self._spent = 0.0
        self._versions = 0  # the sum of the parameters' version counters, which changes with each update
        self._switch.on = None
        self._counters = torch._dynamo.utils.counters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if torch.compiler.is_dynamo_compiling():
            return self._model._call_impl(*args, **kwargs)
        training, outer = torch.is_grad_enabled(), self._switch.on
        on = self._is_ready(args, kwargs)
        if training:
            self._switch.recompute_compiled = on
            if not on and _is_in_checkpoint():
                self._switch.saw_checkpoint = True
        self._switch.on = on
        try:
            return self._compiled(*args, **kwargs) if on else self._model._call_impl(*args, **kwargs)
        finally:
            self._switch.on = outer

    def stop(self) -> None:
        """Stop the forked process; the next call that requires its code starts it again."""
        if self._background is not None:
            self._background.stop()
        self._compiling = None

    def _is_ready(self, args: Any, kwargs: Any) -> bool:
        """Return whether the code for this kind of call is compiled; start the compilation if it has not started."""
        training = torch.is_grad_enabled()
        if training in self._ready or self._background is None:
            return True
        if training in self._given_up:
            return False
        if self._compiling is None:
            self._compiling = training
            work = partial(self._compile_in_child, _thread_state(), args, kwargs)
            try:
                self._background.start(work)
            except OSError:  # raised if no process can be started
                self._background = None
                return True
        may_recompute = training and self._may_recompute()
        if not self._background.done() or may_recompute:
            return False
        finished, self._compiling = self._compiling, None
        if self._background.exceeded:
            self._given_up.add(finished)
            self._on_exceeded(finished)
        else:  # a failed compilation is retried in this process, which reports the error
            self._ready.add(finished)
        return training in self._ready

    def _may_recompute(self) -> bool:
        """Return whether modules that ran eagerly may still be recomputed; after a weight update, they cannot be."""
        before, self._versions = self._versions, sum(param._version for param in self._model.parameters())
        return self._switch.saw_checkpoint and self._versions == before

    def _compile_in_child(self, state: Callable[[], Any], args: Any, kwargs: Any) -> None:
        """Compile the model for these arguments; runs in a forked process."""
        self._switch.on = True
        # The model may change buffers and inputs in place, and the processes share some memory, such as the memory of
        # batches from loader workers.
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.layout is torch.strided and tensor.is_shared():
                tensor.data = tensor.data.clone()
        with suppress(Exception):  # some objects cannot be copied
            args, kwargs = deepcopy((args, kwargs))
        with state():
            self._call(*args, **kwargs)

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        # The first call loads the code that the forked process has compiled.
        self._switch.only_existing = self._spent > (self._limit if self._compiles_here else 0)
        if self._switch.only_existing:
            return self._call(*args, **kwargs)
        before, started = self._counters["frames"]["total"], time.monotonic()
        result = self._call(*args, **kwargs)
        if self._counters["frames"]["total"] != before:
            self._spent += time.monotonic() - started
        return result


def _is_in_checkpoint() -> bool:
    """Return whether saved-tensor hooks are active, as in a checkpoint and its recomputation."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _thread_state() -> Callable[[], Any]:
    """Return a function that creates a context manager with the current thread's settings.

    These are the grad mode, inference mode and CPU autocast, which new threads do not inherit.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def state() -> Iterator[None]:
        with (
            torch.inference_mode(inference),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype=dtype, enabled=autocast, cache_enabled=caches),
        ):
            yield

    return state
