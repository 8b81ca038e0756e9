"""Which plans cannot work, and what a machine cannot do: all of it, in two tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError
from slipstream.speed.capabilities import Capabilities

if TYPE_CHECKING:
    from slipstream.speed.plan import SpeedPlan

__all__ = ["IDLE", "REFUSED", "Refusal", "check", "idle"]


@dataclass(frozen=True)
class Refusal:
    """A plan that cannot work."""

    option: str
    """The option whose place the error names."""
    when: Callable[[SpeedPlan, Capabilities], bool]
    message: str
    """What is wrong, and the remedy."""


def _named(plan: SpeedPlan, precision: str) -> bool:
    return plan.precision is not None and plan.precision.name == precision


def _compiles_step(plan: SpeedPlan) -> bool:
    return plan.compile is not None and plan.compile.scope in (None, "step")


REFUSED = (
    Refusal(
        "precision",
        lambda plan, capabilities: _named(plan, "fp8") and capabilities.capability < (8, 9),
        "'fp8' needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper): take 'bf16'",
    ),
    Refusal(
        "precision",
        lambda plan, capabilities: _named(plan, "fp8") and not capabilities.torchao,
        "'fp8' needs torchao: pip install 'slipstream[fp8]'",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, capabilities: plan.cuda_graph and capabilities.device != "cuda",
        "replays the step on an NVIDIA or AMD GPU, and there is none here: leave it out",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, capabilities: plan.cuda_graph and not _compiles_step(plan),
        "replays the whole compiled step: add compile=dict(scope='step')",
    ),
    Refusal(
        "compile",
        lambda plan, capabilities: (
            plan.compile is not None
            and plan.compile.scope == "step"
            and plan.parallel is not None
            and plan.parallel.kind != "ddp"
        ),
        "scope 'step' sums whole gradients itself, as DDP does: take scope='model', or parallel='ddp'",
    ),
    Refusal(
        "compile",
        lambda plan, capabilities: (
            plan.compile is not None
            and plan.compile.backend == "eager"
            and plan.activation_checkpointing is not None
        ),
        "torch's backend 'eager' cannot run the backward of a checkpointed block: take 'aot_eager' or 'inductor'",
    ),
    Refusal(
        "find_unused_parameters",
        lambda plan, capabilities: (
            plan.find_unused_parameters and plan.parallel is not None and plan.parallel.sharded
        ),
        "is DDP's; a sharded model needs no such search: leave it out",
    ),
)
"""Every plan that is refused when it is made."""

IDLE = (
    ("precision", lambda plan, capabilities: _named(plan, "tf32") and not capabilities.tf32,
     "'tf32' needs an NVIDIA GPU of compute capability 8.0 or higher (Ampere); float32 is computed"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.device != "cuda",
     "there is no cuDNN on this device"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.deterministic,
     "randomness.deterministic takes the same algorithm each time"),
    ("expandable_segments", lambda plan, capabilities: plan.expandable_segments and capabilities.device != "cuda",
     "it concerns the memory of a GPU"),
    ("prefetch", lambda plan, capabilities: bool(plan.prefetch) and capabilities.device == "cpu",
     "batches are in the CPU's memory already"),
    ("activation_checkpointing", lambda plan, capabilities: (
        plan.activation_checkpointing is not None and plan.activation_checkpointing.offload
        and plan.compile is not None),
     "offload: compiled code keeps the inputs of blocks on the device; they are recomputed all the same"),
    ("sync_bn", lambda plan, capabilities: plan.sync_bn and capabilities.world_size == 1,
     "one process has the whole batch"),
    ("parallel", lambda plan, capabilities: plan.parallel is not None and capabilities.world_size == 1,
     "there is one process: start several with --nproc or a launcher"),
)  # fmt: skip
"""Every option that has no effect on some machine: its name, when, and why. A plan may still hold it, so that one
configuration serves a laptop and a cluster."""


def check(plan: SpeedPlan, capabilities: Capabilities) -> None:
    """Refuse a plan that cannot work.

    Raises:
        ConfigError: the first line of `REFUSED` that applies, with the place that the option was set in.
    """
    for refusal in REFUSED:
        if refusal.when(plan, capabilities):
            raise ConfigError(refusal.message, plan.place(refusal.option))


def idle(plan: SpeedPlan, capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    """Yield the options of a plan that have no effect here, and why."""
    for option, when, why in IDLE:
        if when(plan, capabilities):
            yield option, why
