"""Recommendations based on the measured time breakdown, each with an upper bound on the speedup."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.report.record import NON_TRAINING_PHASES, RunRecord

# Minimum number of steps: the time breakdown of a shorter run does not predict that of a longer run well.
_MIN_STEPS = 11


@dataclass(frozen=True)
class Advice:
    """A recommendation. `share` is the maximum fraction of the training time that it can save."""

    share: float
    problem: str
    remedy: str

    @property
    def text(self) -> str:
        """The recommendation with its bound: the training time divided by the time that remains."""
        bound = math.ceil(100 / (1 - self.share)) / 100  # rounded up, to remain an upper bound
        return (
            f"{self.share:.0%} of the training time {self.problem}. Eliminating this time would speed up training by "
            f"a factor of at most {bound:.2f}. {self.remedy}"
        )


def has_enough_steps(record: RunRecord) -> bool:
    """Return whether the run has enough steps for recommendations."""
    return record.phases.steps >= _MIN_STEPS and record.training_seconds > 0


def advice(record: RunRecord) -> list[Advice]:
    """Return the recommendations for a run, in descending order of their shares.

    If a phase takes a fraction `p` of the host's time, a recommendation for it cannot save more than `p`, even on an
    accelerator, because the host's phases add up to the duration of training. There are no recommendations for the
    forward and backward passes, nor for the optimizer on an accelerator, because the host cannot measure how much of
    this time an option would save.
    """
    if not has_enough_steps(record):
        return []
    settings = record.settings
    on_cpu, workers = settings.get("device") == "cpu", settings.get("num_workers")
    prefetch = not on_cpu and not settings.get("prefetch")
    background = ", or in the background (async_save=True)" if settings.get("async_save") is False else ""
    # On an accelerator, the host waits for the device when it reads losses, so this time is not the cost of logging.
    rules = [
        ("data", 0.05, True, "is spent waiting for data",
         f"num_workers is {workers}. Try another number (slipstream tune), the decode-once cache (slipstream data "
         "cache), or smaller files."),
        ("preprocess", 0.05, True, "is spent in the data preprocessor",
         "Try prefetch=2, which copies batches ahead of time." if prefetch else "Simplify the data preprocessor."),
        ("validation", 0.2, True, "is spent in validation", "Validate less often (train_cfg.val_interval)."),
        ("checkpoint", 0.03, True, "is spent saving checkpoints",
         f"Save less often (default_hooks.checkpoint.interval){background}."),
        ("logging", 0.03, on_cpu, "is spent reading losses and writing log lines",
         "Log less often (default_hooks.logger.interval)."),
        ("hooks", 0.05, True, "is spent in hooks", "Check the custom hooks, for example with ProfilerHook."),
        ("optimizer", 0.15, on_cpu and settings.get("fused") is False, "is spent in the optimizer",
         "Try fused=True, which computes the update in fewer kernels."),
    ]  # fmt: skip
    shares = _shares(record)
    items = [
        Advice(shares[phase], problem, remedy)
        for phase, min_share, applies, problem, remedy in rules
        if applies and min_share <= shares.get(phase, 0.0) < 1
    ]
    return sorted(items, key=lambda item: -item.share)


def tuning(record: RunRecord) -> str:
    """Return what `slipstream tune` would try for an eager run on a CPU, with the maximum fraction that each saves.

    The result is empty on an accelerator, because the host cannot measure how long the device computes.
    """
    if not has_enough_steps(record) or record.settings.get("device") != "cpu":
        return ""
    shares, used = _shares(record), {row.option for row in record.options if row.value != "off"}
    passes = sum(shares.get(phase, 0.0) for phase in ("step", "forward", "backward"))
    update = shares.get("optimizer", 0.0)
    bounds = {
        "compile": passes + update, "precision": passes, "channels_last": passes, "fused": update,
        "num_workers": shares.get("data", 0.0),
    }  # fmt: skip
    if record.settings.get("fused"):
        used.add("fused")
    options = [name for name, share in bounds.items() if name not in used and share >= 0.01]
    if not options or "compile" in used:
        return ""
    command = f"slipstream tune {record.settings.get('config') or 'CONFIG'} --options {','.join(options)}"
    parts = ", ".join(f"{name} ({bounds[name]:.0%})" for name in options)
    return (
        f"These options are not used. Each can save at most the share of the training time in parentheses: {parts}. "
        f"To measure them on this machine, run: {command}"
    )


def _shares(record: RunRecord) -> dict[str, float]:
    """Return the fraction of the training time that each phase takes."""
    return {
        phase: seconds / record.training_seconds
        for phase, seconds in record.phases.seconds.items()
        if phase not in NON_TRAINING_PHASES
    }
