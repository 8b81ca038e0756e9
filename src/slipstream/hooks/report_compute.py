"""Count the operations of a training step for the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slipstream.dist import get_world_size
from slipstream.model import unwrap_model
from slipstream.optim import AmpOptimWrapper
from slipstream.report.record import Compute
from slipstream.speed.apply import overrides_train_step
from slipstream.speed.flops import peak_flops, training_flops, without_data
from slipstream.speed.precision import Precision
from slipstream.step import EagerStep
from slipstream.step.graph import GraphStep

if TYPE_CHECKING:
    from slipstream.runner import Runner

__all__ = ["ComputeCount"]


class ComputeCount:
    """The number of operations in a step, counted after the run from the shapes of the first batch.

    A forward hook observes the data preprocessor's output for the first batch. The hook is then removed, so it adds no
    work to later steps.

    Args:
        runner: the Runner, after TF32 is configured.
        peak_tflops: the peak throughput of the device in 10^12 operations per second; by default, of its name.
    """

    def __init__(self, runner: Runner, peak_tflops: float | None) -> None:
        self._precision = _precision(runner)
        device = runner.device
        self._name = (
            torch.get_device_module(device).get_device_name() if device.type == "cuda" else device.type
        )
        known = peak_flops(self._name, self._precision)
        self._peak = 1e12 * peak_tflops if peak_tflops else known[0] if known else None
        self._inputs: Any = None
        self._samples = 0
        self._handle: Any = None
        preprocessor = runner.interface.preprocessor
        if self._peak is None or not isinstance(preprocessor, nn.Module):
            return

        # Use a nested function, because copying the model would copy a bound method together with its object.
        def observe(module: nn.Module, arguments: Any, options: Any, outputs: Any) -> None:
            if module is preprocessor and (options.get("training") or arguments[1:2] == (True,)):
                self._handle.remove()
                self._inputs = without_data(outputs)
                self._samples = getattr(runner.train_loop, "step_samples", 0) // get_world_size()

        self._handle = preprocessor.register_forward_hook(observe, with_kwargs=True)

    def result(self, runner: Runner) -> Compute:
        """Count the operations if the peak throughput of the device is known."""
        if self._handle is not None:
            self._handle.remove()
        compute = Compute(devices=get_world_size(), precision=self._precision)
        core: Any = unwrap_model(runner.model)
        optim = runner.optim_wrapper
        if self._peak is None:
            compute.problem = (
                f"the peak throughput of {self._name} in {self._precision} is not known; set it with "
                "default_hooks.report.peak_tflops"
            )
            return compute
        compute.peak_flops = self._peak
        if any(overrides_train_step(model) for model in (runner.model, core)):
            compute.problem = f"{type(core).__name__} defines its own training step"
        elif any(part.replaces_gradients for part in getattr(optim, "parts", ())):
            compute.problem = "an option computes the gradients of a batch more than once"
        elif self._inputs is None or not self._samples:
            compute.problem = "the run has no training step"
        else:
            eager = runner.step.eager if isinstance(runner.step, GraphStep) else runner.step
            restricted = isinstance(eager, EagerStep) and eager.restricts_backward
            trained = list(optim.parameters()) if restricted and optim else None
            try:
                flops = training_flops(core, self._inputs, runner.interface.total_loss, trained)
                compute.flops_per_sample = flops / self._samples
            except Exception as error:  # for example, if the loss depends on tensor values
                compute.problem = f"the operations cannot be counted: {str(error).partition(chr(10))[0]}"
        return compute


def _precision(runner: Runner) -> Precision:
    """Return the precision of most matrix products and convolutions."""
    plan = runner.speed.precision
    if plan is not None and plan.name == "fp8":
        return "fp8"
    if isinstance(runner.optim_wrapper, AmpOptimWrapper):
        return "fp16" if runner.optim_wrapper.dtype == torch.float16 else "bf16"
    return "tf32" if runner.device.type == "cuda" and _uses_tf32() else "fp32"


def _uses_tf32() -> bool:
    """Return whether float32 convolutions or matrix products use TF32 on NVIDIA GPUs; by default, convolutions do."""
    try:
        return bool(torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # the settings were changed through torch's newer interface
        backends: Any = torch.backends
        return "tf32" in (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
