"""Checks of a plan: combinations of options that raise an error, and options that have no effect on a machine."""

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
    """An invalid plan."""

    option: str
    """The option whose config path the error names."""
    when: Callable[[SpeedPlan, Capabilities], bool]
    message: str
    """What is wrong, and how to fix it."""


def _named(plan: SpeedPlan, precision: str) -> bool:
    return plan.precision is not None and plan.precision.name == precision


def _compiles_step(plan: SpeedPlan) -> bool:
    return plan.compile is not None and plan.compile.scope in (None, "step")


REFUSED = (
    Refusal(
        "precision",
        lambda plan, capabilities: _named(plan, "fp8") and capabilities.capability < (8, 9),
        "'fp8' requires an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper); use 'bf16'",
    ),
    Refusal(
        "precision",
        lambda plan, capabilities: _named(plan, "fp8") and not capabilities.torchao,
        "'fp8' requires torchao; run: pip install 'slipstream[fp8]'",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, capabilities: plan.cuda_graph and capabilities.device != "cuda",
        "requires an NVIDIA or AMD GPU; none found. Remove this option",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, capabilities: plan.cuda_graph and not _compiles_step(plan),
        "requires a step that is compiled as one graph; add compile=dict(scope='step')",
    ),
    Refusal(
        "compile",
        lambda plan, capabilities: (
            plan.compile is not None
            and plan.compile.scope == "step"
            and plan.parallel is not None
            and plan.parallel.kind != "ddp"
        ),
        "scope='step' does not support sharded models or custom wrappers; use scope='model' or parallel='ddp'",
    ),
    Refusal(
        "compile",
        lambda plan, capabilities: (
            plan.compile is not None
            and plan.compile.backend == "eager"
            and plan.activation_checkpointing is not None
        ),
        "backend 'eager' does not support activation_checkpointing; use 'aot_eager' or 'inductor'",
    ),
    Refusal(
        "find_unused_parameters",
        lambda plan, capabilities: (
            plan.find_unused_parameters and plan.parallel is not None and plan.parallel.sharded
        ),
        "applies only to DDP; remove it or use parallel='ddp'",
    ),
)
"""The conditions under which `check` raises an error."""

IDLE = (
    ("precision", lambda plan, capabilities: _named(plan, "tf32") and not capabilities.tf32,
     "'tf32' requires an NVIDIA GPU of compute capability 8.0 or higher (Ampere); the step computes in float32"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.device != "cuda",
     "this device does not use cuDNN"),
    ("cudnn_benchmark", lambda plan, capabilities: plan.cudnn_benchmark and capabilities.deterministic,
     "randomness.deterministic disables the benchmark"),
    ("expandable_segments", lambda plan, capabilities: plan.expandable_segments and capabilities.device != "cuda",
     "this option only affects GPU memory"),
    ("prefetch", lambda plan, capabilities: bool(plan.prefetch) and capabilities.device == "cpu",
     "batches are already in CPU memory"),
    ("activation_checkpointing", lambda plan, capabilities: (
        plan.activation_checkpointing is not None and plan.activation_checkpointing.offload
        and plan.compile is not None),
     "compiled code does not support offload; it keeps the inputs of blocks on the device and recomputes the rest"),
    ("sync_bn", lambda plan, capabilities: plan.sync_bn and capabilities.world_size == 1,
     "a single process already normalizes over the whole batch"),
    ("parallel", lambda plan, capabilities: plan.parallel is not None and capabilities.world_size == 1,
     "only one process is running; start several with --nproc or a launcher"),
)  # fmt: skip
"""Options that have no effect under a condition: name, condition and reason. They raise no error, so the same
configuration works on a laptop and on a cluster."""


def check(plan: SpeedPlan, capabilities: Capabilities) -> None:
    """Check that a plan is valid.

    Raises:
        ConfigError: an entry of `REFUSED` applies. The error names the config path of the option.
    """
    for refusal in REFUSED:
        if refusal.when(plan, capabilities):
            raise ConfigError(refusal.message, plan.config_path(refusal.option))


def idle(plan: SpeedPlan, capabilities: Capabilities) -> Iterator[tuple[str, str]]:
    """Yield the name of each option that has no effect on this machine, and the reason."""
    for option, when, why in IDLE:
        if when(plan, capabilities):
            yield option, why
