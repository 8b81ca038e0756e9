"""The speed options to measure, in order, with the tolerance of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.cores import cores
from slipstream.errors import ConfigError, UnknownNameError, did_you_mean
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.speed.plan import rules
from slipstream.tune.jobs import Setting


@dataclass(frozen=True)
class Tolerance:
    """Maximum relative differences between the losses of a trial and those of the baseline."""

    # Maximum difference in the first loss, before any weight update.
    first: float
    # Maximum difference in the mean loss. Optimizers such as Adam amplify rounding errors in the first updates.
    mean: float


# Tolerance for options that compute in float32: only the order of operations may change.
EXACT = Tolerance(first=1e-4, mean=2e-2)
# Tolerance for options that compute in 16-bit precision or TF32.
LOW_PRECISION = Tolerance(first=2e-2, mean=5e-2)

_MAX_WORKERS = 8

OPTIONS = ("num_workers", "channels_last", "fused", "precision", "prefetch", "cudnn_benchmark", "compile",
           "compile_mode", "compile_dynamic", "cuda_graph", "activation_checkpointing")  # fmt: skip
"""The options in order of measurement. Compilation takes minutes, so it is measured after the options that are often
adopted and would require another compilation."""


@dataclass(frozen=True)
class Candidate:
    """A value of an option."""

    option: str
    label: str
    setting: Setting
    tolerance: Tolerance = EXACT
    # The label of another value of the option. If that value works, this value is skipped.
    fallback_for: str = ""
    # Another option. This value is skipped unless that option is part of the plan.
    requires: str = ""


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names in the order of measurement.

    Raises:
        ConfigError: there are no names.
        UnknownNameError: a name is not in `OPTIONS`.
    """
    names = list(names)
    if not names:
        raise ConfigError("is empty; omit it to measure all options", "options")
    for name in names:
        if name not in OPTIONS:
            hint = f"{did_you_mean(name, OPTIONS)} (choose from {', '.join(OPTIONS)})"
            raise UnknownNameError(f"'{name}' is not an option that can be measured{hint}", "options")
    return [name for name in OPTIONS if name in names]


def candidates(
    names: Sequence[str], capabilities: Capabilities, num_workers: int, shapes: int
) -> Iterator[Candidate]:
    """Yield the values to measure.

    Args:
        names: options, as returned by `check_names`.
        capabilities: capabilities of the machine and the model.
        num_workers: number of worker processes of the baseline's loader.
        shapes: number of distinct shapes among the baseline's first batches.
    """
    on_cpu = capabilities.device == "cpu"
    for name in names:
        if name == "num_workers":
            if (count := min(cores(), _MAX_WORKERS)) != num_workers:
                yield Candidate(name, f"num_workers={count}", Setting(num_workers=count))
        elif name == "precision":
            for dtype in ("bf16",) if on_cpu else ("tf32", "bf16", "fp16"):
                yield Candidate(name, f"precision={dtype}", Setting({name: dtype}), LOW_PRECISION)
        elif name == "prefetch":
            yield Candidate(name, "prefetch=2", Setting({name: 2}))
        elif name == "compile":
            yield _compilation("scope", "step")
            yield _compilation("scope", "model", fallback_for="compile=step")
        elif name == "compile_mode":  # other modes use CUDA graphs, which the `cuda_graph` option covers
            yield _compilation("mode", "max-autotune-no-cudagraphs", requires="compile")
        elif name == "compile_dynamic":
            for value in (True, False) if shapes > 1 else ():
                yield _compilation("dynamic", value, requires="compile")
        else:
            yield Candidate(name, name, Setting({name: True}))


def _compilation(key: str, value: object, fallback_for: str = "", requires: str = "") -> Candidate:
    setting = Setting({"compile": {key: value}})
    label = f"compile{'' if key == 'scope' else f'.{key}'}={value}"
    return Candidate("compile", label, setting, EXACT, fallback_for, requires)


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
    refused, without_effect = rules(plan, capabilities)
    relevant = [*refused, *(rule for rule in without_effect if rule.option in setting.speed)]
    return next((rule.message for rule in relevant if rule.applies), None)
