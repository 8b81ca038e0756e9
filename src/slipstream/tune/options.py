"""The speed options to measure, in order, with the tolerance of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slipstream.cores import cores
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.speed.plan import REFUSED, idle
from slipstream.tune.jobs import Setting

__all__ = [
    "DATA_PARALLEL",
    "EXACT",
    "LOW_PRECISION",
    "OPTIONS",
    "Batches",
    "Candidate",
    "Tolerance",
    "candidates",
    "check_names",
    "unsupported_reason",
]


@dataclass(frozen=True)
class Tolerance:
    """Maximum relative differences between the losses of a trial and those of the baseline."""

    first: float
    """Maximum difference in the first loss, before any weight update."""
    mean: float
    """Maximum difference in the mean loss. Optimizers such as Adam amplify rounding errors in the first updates."""


EXACT = Tolerance(first=1e-4, mean=2e-2)
"""Tolerance for options that compute in float32: only the order of operations may change."""
LOW_PRECISION = Tolerance(first=2e-2, mean=5e-2)
"""Tolerance for options that compute in 16-bit precision or TF32."""

DATA_PARALLEL = Tolerance(first=1e-2, mean=5e-2)
"""Tolerance for data parallelism. The mean over the processes differs from the mean loss of the global batch if the
processes average over different numbers of elements, such as pixels that are not ignored."""

_MAX_WORKERS = 8

OPTIONS = (
    "num_workers",
    "channels_last",
    "fused",
    "precision",
    "prefetch",
    "cudnn_benchmark",
    "compile",
    "compile_mode",
    "compile_dynamic",
    "cuda_graph",
    "activation_checkpointing",
    "data_parallel",
    "accumulate",
)
"""The options in order of measurement. Compilation takes minutes, so it is measured after the options that are often
adopted and would require another compilation. Data parallelism is never adopted. It is measured before accumulation,
because it divides the baseline's batches, whose size changes if accumulation is adopted."""


@dataclass(frozen=True)
class Candidate:
    """A value of an option."""

    option: str
    label: str
    setting: Setting
    tolerance: Tolerance = EXACT
    fallback_for: str = ""
    """The label of another value of the option. If that value works, this value is skipped."""
    requires: str = ""
    """Another option. This value is skipped unless that option is part of the plan."""
    problem: str = ""
    """Why this value cannot be measured; empty if it can."""


@dataclass(frozen=True)
class Batches:
    """Properties of the baseline's batches."""

    num_workers: int = 0
    """Number of worker processes of the loader."""
    size: int | None = None
    """Samples per batch; None if the batches cannot be divided into smaller batches."""
    shapes: int = 1
    """Number of distinct shapes among the first batches."""
    counts_steps: bool = False
    """Whether the run length, the epoch length or the learning rate schedule is specified in steps."""


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names in the order of measurement.

    Raises:
        ConfigError: there are no names.
        UnknownNameError: a name is not in `OPTIONS`.
    """
    names = list(names)
    if not names:
        raise ConfigError(
            f"is empty; choose from {', '.join(OPTIONS)}, or omit it to measure all options", "options"
        )
    for name in names:
        if name not in OPTIONS:
            raise UnknownNameError(
                f"'{name}' is not an option that can be measured{did_you_mean(name, OPTIONS)} "
                f"(choose from {', '.join(OPTIONS)})",
                "options",
            )
    return [name for name in OPTIONS if name in names]


def candidates(names: Sequence[str], capabilities: Capabilities, batches: Batches) -> Iterator[Candidate]:
    """Yield the values to measure.

    Args:
        names: options, as returned by `check_names`.
        capabilities: capabilities of the machine and the model.
        batches: the batches of the baseline.
    """
    for name in names:
        yield from _values(name, capabilities, batches)


def _values(name: str, capabilities: Capabilities, batches: Batches) -> Iterator[Candidate]:
    if name in ("compile", "compile_mode", "compile_dynamic"):
        yield from _compilations(name, batches)
    elif name == "accumulate":
        yield _smaller_batches(batches)
    elif name == "data_parallel":
        for kind in ("ddp",) if capabilities.device == "cpu" else ("ddp", "fsdp2"):
            yield _data_parallel(kind, capabilities, batches)
    elif name == "num_workers":
        count = min(cores(), _MAX_WORKERS)
        if count != batches.num_workers:
            yield Candidate(name, f"num_workers={count}", Setting(num_workers=count))
    elif name == "precision":
        for dtype in ("bf16",) if capabilities.device == "cpu" else ("tf32", "bf16", "fp16"):
            yield Candidate(name, f"precision={dtype}", Setting({name: dtype}), LOW_PRECISION)
    elif name == "prefetch":
        yield Candidate(name, "prefetch=2", Setting({name: 2}))
    else:
        yield Candidate(name, name, Setting({name: True}))


def _compilations(name: str, batches: Batches) -> Iterator[Candidate]:
    """Yield the values of `scope`, or the values of `mode` or `dynamic` to measure with the adopted scope.

    Modes that use CUDA graphs are omitted, because the `cuda_graph` option covers them.
    """
    if name == "compile":
        yield Candidate(name, "compile=step", Setting({"compile": {"scope": "step"}}))
        yield Candidate(
            name, "compile=model", Setting({"compile": {"scope": "model"}}), fallback_for="compile=step"
        )
    elif name == "compile_mode":
        mode = "max-autotune-no-cudagraphs"
        yield Candidate(
            "compile", f"compile.mode={mode}", Setting({"compile": {"mode": mode}}), requires="compile"
        )
    else:
        problem = "all measured batches have the same shape" if batches.shapes == 1 else ""
        for value in (True, False):
            setting = Setting({"compile": {"dynamic": value}})
            yield Candidate(
                "compile", f"compile.dynamic={value}", setting, requires="compile", problem=problem
            )


def _smaller_batches(batches: Batches) -> Candidate:
    """Return the candidate that accumulates two batches of half the size, which keeps the effective batch size."""
    size, problem = batches.size, ""
    if size is None:
        problem = "requires batches that can be divided into smaller batches"
    elif size % 2:
        problem = f"requires an even batch size, not {size}"
    elif batches.counts_steps:
        problem = (
            "the run length, the epoch length or the learning rate schedule is specified in steps, "
            "and the number of steps would double"
        )
    setting = Setting({"accumulate": 2}, batch_size=None if size is None else size // 2, split=2)
    return Candidate("accumulate", "accumulate=2, half the batch size", setting, problem=problem)


def _data_parallel(kind: str, capabilities: Capabilities, batches: Batches) -> Candidate:
    """Return the candidate that uses all devices, or two CPU processes, with the same global batch size."""
    on_cpu = capabilities.device == "cpu"
    count = min(cores(), 2) if on_cpu else torch.accelerator.device_count()
    size, problem = batches.size, ""
    if count < 2:
        problem = f"requires at least two {'cores' if on_cpu else 'devices'}"
    elif size is None:
        problem = "requires batches that can be divided into smaller batches"
    elif size % count:
        problem = f"requires a batch size that is divisible by {count}, not {size}"
    local_size = None if size is None else size // max(count, 1)
    # BatchNorm must use the statistics of the global batch.
    setting = Setting({"parallel": kind, "sync_bn": True}, batch_size=local_size, processes=max(count, 1))
    label = f"parallel={kind}, {max(count, 2)} processes"
    return Candidate("parallel", label, setting, DATA_PARALLEL, problem=problem)


def unsupported_reason(setting: Setting, speed: dict[str, object], capabilities: Capabilities) -> str | None:
    """Return why an option is refused or has no effect on this machine; None if it can be measured.

    Args:
        setting: the changes of a candidate.
        speed: the options of the trial, which combine the options already in use with those of the candidate.
        capabilities: capabilities of the machine and the model.

    Raises:
        ConfigError: a value in `speed` is invalid.
    """
    plan = SpeedPlan.read(speed, device=capabilities.device)
    reasons = [refusal.message for refusal in REFUSED if refusal.when(plan, capabilities)]
    reasons += [reason for option, reason in idle(plan, capabilities) if option in setting.speed]
    return reasons[0] if reasons else None
