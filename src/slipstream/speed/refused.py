"""Which plans cannot work, and what a machine cannot do: all of it, in two tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError
from slipstream.speed.facts import Facts

if TYPE_CHECKING:
    from slipstream.speed.plan import SpeedPlan

__all__ = ["IDLE", "REFUSED", "Refusal", "check", "idle"]


@dataclass(frozen=True)
class Refusal:
    """A plan that cannot work."""

    lever: str
    """The lever whose place the error names."""
    when: Callable[[SpeedPlan, Facts], bool]
    message: str
    """What is wrong, and the remedy."""


def _named(plan: SpeedPlan, precision: str) -> bool:
    return plan.precision is not None and plan.precision.name == precision


def _compiles_step(plan: SpeedPlan) -> bool:
    return plan.compile is not None and plan.compile.scope in (None, "step")


REFUSED = (
    Refusal(
        "precision",
        lambda plan, facts: _named(plan, "fp8") and facts.capability < (8, 9),
        "'fp8' needs an NVIDIA GPU of compute capability 8.9 or higher (Ada, Hopper): take 'bf16'",
    ),
    Refusal(
        "precision",
        lambda plan, facts: _named(plan, "fp8") and not facts.torchao,
        "'fp8' needs torchao: pip install 'slipstream[fp8]'",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, facts: plan.cuda_graph and facts.device != "cuda",
        "replays the step on an NVIDIA or AMD GPU, and there is none here: leave it out",
    ),
    Refusal(
        "cuda_graph",
        lambda plan, facts: plan.cuda_graph and not _compiles_step(plan),
        "replays the whole compiled step: add compile=dict(scope='step')",
    ),
    Refusal(
        "compile",
        lambda plan, facts: (
            plan.compile is not None
            and plan.compile.scope == "step"
            and plan.parallel is not None
            and plan.parallel.kind != "ddp"
        ),
        "scope 'step' sums whole gradients itself, as DDP does: take scope='model', or parallel='ddp'",
    ),
    Refusal(
        "compile",
        lambda plan, facts: (
            plan.compile is not None
            and plan.compile.backend == "eager"
            and plan.activation_checkpointing is not None
        ),
        "torch's backend 'eager' cannot run the backward of a checkpointed block: take 'aot_eager' or 'inductor'",
    ),
    Refusal(
        "find_unused_parameters",
        lambda plan, facts: (
            plan.find_unused_parameters and plan.parallel is not None and plan.parallel.sharded
        ),
        "is DDP's; a sharded model needs no such search: leave it out",
    ),
)
"""Every plan that is refused when it is made."""

IDLE = (
    ("precision", lambda plan, facts: _named(plan, "tf32") and not facts.tf32,
     "'tf32' needs an NVIDIA GPU of compute capability 8.0 or higher (Ampere); float32 is computed"),
    ("cudnn_benchmark", lambda plan, facts: plan.cudnn_benchmark and facts.device != "cuda",
     "there is no cuDNN on this device"),
    ("cudnn_benchmark", lambda plan, facts: plan.cudnn_benchmark and facts.deterministic,
     "randomness.deterministic takes the same algorithm each time"),
    ("expandable_segments", lambda plan, facts: plan.expandable_segments and facts.device != "cuda",
     "it concerns the memory of a GPU"),
    ("prefetch", lambda plan, facts: bool(plan.prefetch) and facts.device == "cpu",
     "batches are in the CPU's memory already"),
    ("activation_checkpointing", lambda plan, facts: (
        plan.activation_checkpointing is not None and plan.activation_checkpointing.offload
        and plan.compile is not None),
     "offload: compiled code keeps the inputs of blocks on the device; they are recomputed all the same"),
    ("sync_bn", lambda plan, facts: plan.sync_bn and facts.world_size == 1,
     "one process has the whole batch"),
    ("parallel", lambda plan, facts: plan.parallel is not None and facts.world_size == 1,
     "there is one process: start several with --nproc or a launcher"),
)  # fmt: skip
"""Every lever that has no effect on some machine: its name, when, and why. A plan may still hold it, so that one
configuration serves a laptop and a cluster."""


def check(plan: SpeedPlan, facts: Facts) -> None:
    """Refuse a plan that cannot work.

    Raises:
        ConfigError: the first line of `REFUSED` that applies, with the place that the lever was set in.
    """
    for refusal in REFUSED:
        if refusal.when(plan, facts):
            raise ConfigError(refusal.message, plan.place(refusal.lever))


def idle(plan: SpeedPlan, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield the levers of a plan that have no effect here, and why."""
    for lever, when, why in IDLE:
        if when(plan, facts):
            yield lever, why
