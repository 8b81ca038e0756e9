"""The speed options that are measured, in order, with the tolerance of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slipstream.cores import cores
from slipstream.errors import UnknownNameError, did_you_mean
from slipstream.speed import Capabilities, SpeedPlan
from slipstream.speed.plan import REFUSED, idle
from slipstream.tune.jobs import Setting

__all__ = [
    "EXACT",
    "LOW_PRECISION",
    "OPTIONS",
    "Candidate",
    "Tolerance",
    "candidates",
    "check_names",
    "unsupported",
]


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences of the losses from those of the baseline."""

    first: float
    """Of the first loss, before any update of the weights."""
    mean: float
    """Of the mean loss of the compared steps. An optimizer such as Adam amplifies rounding errors in early updates."""


EXACT = Tolerance(first=1e-4, mean=2e-2)
"""Of options that compute in float32: the order of operations may change."""
LOW_PRECISION = Tolerance(first=2e-2, mean=5e-2)
"""Of options that compute in 16 bits or TF32."""

_MOST_WORKERS = 8

OPTIONS = (
    "num_workers",
    "channels_last",
    "fused",
    "precision",
    "prefetch",
    "cudnn_benchmark",
    "compile",
    "cuda_graph",
    "activation_checkpointing",
)
"""The options in the order in which they are measured. Compilation takes minutes, so it follows the options that it
compiles."""


@dataclass(frozen=True)
class Candidate:
    """A value of an option."""

    option: str
    label: str
    setting: Setting
    tolerance: Tolerance = EXACT
    unless: str = ""
    """Skip this value if this other value of the option was measured and works."""


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names in the order of measurement.

    Raises:
        UnknownNameError: a name is not in `OPTIONS`.
    """
    names = list(names)
    for name in names:
        if name not in OPTIONS:
            raise UnknownNameError(
                f"'{name}' is not an option that can be measured{did_you_mean(name, OPTIONS)} "
                f"(choose from {', '.join(OPTIONS)})",
                "options",
            )
    return [name for name in OPTIONS if name in names]


def candidates(names: Sequence[str], capabilities: Capabilities, num_workers: int) -> Iterator[Candidate]:
    """Yield the values to measure.

    Args:
        names: options, from `check_names`.
        capabilities: of the machine and the model.
        num_workers: number of worker processes of the baseline's loader.
    """
    for name in names:
        yield from _values(name, capabilities, num_workers)


def _values(name: str, capabilities: Capabilities, num_workers: int) -> Iterator[Candidate]:
    if name == "compile":
        yield Candidate(name, "compile=step", Setting({"compile": {"scope": "step"}}))
        yield Candidate(
            name, "compile=model", Setting({"compile": {"scope": "model"}}), unless="compile=step"
        )
    elif name == "num_workers":
        count = min(cores(), _MOST_WORKERS)
        if count != num_workers:
            yield Candidate(name, f"num_workers={count}", Setting(num_workers=count))
    elif name == "precision":
        for dtype in ("bf16",) if capabilities.device == "cpu" else ("tf32", "bf16", "fp16"):
            yield Candidate(name, f"precision={dtype}", Setting({name: dtype}), LOW_PRECISION)
    elif name == "prefetch":
        yield Candidate(name, "prefetch=2", Setting({name: 2}))
    else:
        yield Candidate(name, name, Setting({name: True}))


def unsupported(setting: Setting, speed: dict[str, object], capabilities: Capabilities) -> str | None:
    """Return the reason that an option is refused or has no effect on this machine, or None.

    Args:
        setting: the changes of a candidate.
        speed: the options that are already in use.
        capabilities: of the machine and the model.

    Raises:
        ConfigError: a value in `speed` is invalid.
    """
    plan = SpeedPlan.read({**speed, **setting.speed}, device=capabilities.device)
    reasons = [refusal.message for refusal in REFUSED if refusal.when(plan, capabilities)]
    reasons += [why for option, why in idle(plan, capabilities) if option in setting.speed]
    return reasons[0] if reasons else None
