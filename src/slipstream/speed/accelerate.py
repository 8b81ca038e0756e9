"""For people who keep their own loop: the Runner's step, with its options, as a function of a batch."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slipstream.dist import get_world_size
from slipstream.errors import ConfigError, DataError
from slipstream.model import BaseAveragedModel, unwrap_model
from slipstream.model.data_preprocessor import BaseDataPreprocessor
from slipstream.optim import OptimWrapper
from slipstream.registry import OPTIM_WRAPPERS
from slipstream.speed.apply import add_parts, compiling, fuse_optim, plan_optim, prepare_model, switches
from slipstream.speed.capabilities import Capabilities
from slipstream.speed.ema import EmaOptions
from slipstream.speed.plan import SpeedPlan
from slipstream.speed.steps import Training, build_step
from slipstream.step.average import AveragePart
from slipstream.step.graph import GraphStep

__all__ = ["TrainStep", "accelerate"]

_ELSEWHERE = {
    "gc": "concerns a whole run: take a Runner, or call gc.collect() in your loop",
    "nan_guard": "needs somebody who reads the losses: take a Runner, or look at them in your loop",
    "prefetch": "is the loop's: for batch in feed(loader, prefetch=2)",
}
"""Options that a step alone cannot pull."""


def accelerate(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[Any, Any], Tensor | Mapping[str, Tensor]],
    speed: Any = "auto",
    total_steps: int | None = None,
) -> TrainStep:
    """Return a training step: `log = step(batch)` does forward, loss, backward, gradient sync, clipping, update.

    Where a process group exists (`slipstream.dist.init_dist`, or torch's own), gradients are averaged over it. The
    model is moved to the accelerator in place, and stays the object to validate and save.

    Args:
        model: any module.
        optimizer: over the model's parameters.
        loss_fn: `loss_fn(outputs, targets)`, for batches `(inputs, targets)`; a scalar, or a dict of which those with
            `loss` in their name are summed. Batches may be `(*inputs, targets)`.
        speed: the options, `'auto'` or a dict of `SpeedPlan`'s fields.
        total_steps: batches of the whole training, for what follows its end: the decay of `ema` of type 'exp', a
            smaller last window of `accumulate`.

    Raises:
        ConfigError: an option cannot work here.
    """
    if not callable(loss_fn):
        raise ConfigError(f"must be a function of outputs and targets, not {loss_fn!r}", "loss_fn")
    own = set(model.parameters())
    if not any(param in own for group in optimizer.param_groups for param in group["params"]):
        raise ConfigError(
            "it holds none of the model's parameters: make it from model.parameters()", "optimizer"
        )
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    plan = SpeedPlan.read(speed, device=device.type)
    plan = plan.complete(Capabilities.here(device.type, model, world_size=get_world_size()))
    for option, remedy in _ELSEWHERE.items():
        if getattr(plan, option) and not plan.sources[option].startswith("auto"):
            raise ConfigError(remedy, plan.place(option))
    if plan.parallel is not None and plan.parallel.sharded:
        raise ConfigError(
            "the optimizer holds the weights from before they are sharded: take a Runner, which builds it afterwards",
            plan.place("parallel"),
        )
    return TrainStep(prepare_model(model, plan, device), optimizer, loss_fn, plan, device, total_steps)


def _losses(
    loss_fn: Callable[[Any, Any], Tensor | Mapping[str, Tensor]], module: nn.Module, batch: Any
) -> Mapping[str, Any]:
    """Return the losses of a batch `(*inputs, targets)`."""
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise DataError(
            f"a batch must be (inputs, targets), not {type(batch).__name__}: the loader's collate_fn makes it"
        )
    *inputs, targets = batch
    loss = loss_fn(module(*inputs), targets)
    return {"loss": loss} if isinstance(loss, Tensor) else loss


class TrainStep:
    """What `accelerate` returns: a step, and the state that goes with it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        plan: SpeedPlan,
        device: torch.device,
        total_steps: int | None,
    ) -> None:
        self.model = model
        """The model, in DDP if there are several processes."""
        self.plan = plan
        self.optim: OptimWrapper = OPTIM_WRAPPERS.build(
            {"type": "OptimWrapper", **plan_optim({"optimizer": optimizer}, plan, device)}
        )
        fuse_optim(self.optim, plan)
        add_parts(plan, model, self.optim)
        self._total_steps = total_steps
        self.optim.initialize_count_status(model, 0, total_steps or -1)
        move = BaseDataPreprocessor().to(device)
        logger = logging.getLogger("slipstream")
        warn = logger.warning
        self._lasting = ExitStack()
        self._lasting.enter_context(switches(plan, device, warn))
        self._lasting.enter_context(compiling(plan, unwrap_model(model), logger))
        self.close = weakref.finalize(self, self._lasting.close)
        """End the step: log what was compiled, put switches of the process back; else done when the step is gone."""
        training = Training(model, self.optim, partial(_losses, loss_fn), move.cast_data)
        self._step: Any = build_step(training, plan, warn, logger.info)
        if isinstance(self._step, GraphStep):
            self._lasting.callback(self._step.close)
        self.average: BaseAveragedModel | None = None
        """The averaged weights, if the plan has `ema`."""
        if isinstance(plan.ema, EmaOptions):
            self._keep_average(plan.ema, total_steps)

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Train on one batch; return `loss` and others as 0-dim tensors on the device, which nobody has waited for."""
        logs: dict[str, Tensor] = self._step(batch)
        return logs

    @property
    def compiled_scope(self) -> str | None:
        """What is compiled now: 'step', 'model', 'block' or nothing (None)."""
        if isinstance(self._step, GraphStep) and self._step.captured:
            return "step"
        scope = self.plan.compile.scope if self.plan.compile is not None else None
        compiled = any(
            module._compiled_call_impl is not None for module in unwrap_model(self.model).modules()
        )
        return ("block" if scope == "block" else "model") if compiled else None

    @property
    def steps(self) -> int:
        """Batches trained on, those before a resume among them."""
        return self.optim.batches

    def _keep_average(self, how: EmaOptions, total_steps: int | None) -> None:
        place = self.plan.place("ema")
        if how.begin_epoch:
            raise ConfigError("epochs are the loop's own: give begin_iter", place)
        if how.type == "exp" and total_steps is None:
            raise ConfigError(
                "type 'exp' grows towards the end of the training: give accelerate(..., total_steps=), or "
                "ema=dict(type='threshold')",
                place,
            )
        core = unwrap_model(self.model)
        self.average = average = how.average(core)
        window = 1 if average.every_batch else self.optim.accumulative_counts
        average.total_steps = total_steps and max(
            1, -(-total_steps // window) - max(how.begin_iter - 1, 0) // window
        )

        optim = self.optim  # not self: a step that is dropped ends at once
        optim.parts.append(
            AveragePart(
                average,
                core,
                done=lambda: optim.batches,
                window=window,
                total=total_steps,
                begun=lambda batch: batch >= how.begin_iter,
            )
        )

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Let the model hold its averaged weights inside the block, for validation or saving; nothing without `ema`."""
        core = unwrap_model(self.model)
        with ExitStack() as stack:
            if self.average is not None and self.average.steps:
                self.average.swap(core)
                stack.callback(self.average.swap, core)
            yield core

    def state_dict(self) -> dict[str, Any]:
        """Return what goes on with a training, but for the model itself: optimizer, loss scale, average, progress."""
        state: dict[str, Any] = {"optimizer": self.optim.state_dict(), "steps": self.steps}
        if self.average is not None:
            state["average"] = self.average.state_dict()
        if self.steps % self.optim.accumulative_counts:
            state["gradients"] = [param.grad for param in self.optim.parameters()]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, in the middle of an accumulation window, too."""
        self.optim.load_state_dict(state["optimizer"])
        self.optim.initialize_count_status(self.model, state["steps"], self._total_steps or -1)
        if self.average is not None and "average" in state:
            self.average.load_state_dict(state["average"])
        params = list(self.optim.parameters())
        for param, grad in zip(params, state.get("gradients", [None] * len(params)), strict=True):
            param.grad = None if grad is None else grad.to(param.device, copy=True)
