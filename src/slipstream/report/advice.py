"""Recommendations based on the measured time breakdown, each with an upper bound on the speedup."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.report.record import RunRecord

__all__ = [
    "NON_TRAINING_PHASES",
    "Advice",
    "advice",
    "has_enough_steps",
    "mean_speed",
    "training_seconds",
    "tuned_text",
    "waits_for_data",
]

NON_TRAINING_PHASES = ("other", "test")
"""The phases of a run that are not part of training."""

_MIN_WAIT_SHARE = 0.05
"""Waiting for data leads to a recommendation if it takes at least this fraction of the training time."""
_MIN_STEPS = 11
"""Minimum number of steps for recommendations.

The time breakdown of a shorter run does not predict the time breakdown of a longer run well.
"""


@dataclass(frozen=True)
class Advice:
    """A recommendation."""

    share: float
    """The maximum fraction of `training_seconds` that the recommendation can save."""
    problem: str
    """How the time is spent, for example `is spent waiting for data`."""
    remedy: str
    measured: str = ""
    """The measured effect of the remedy; empty if it was not measured."""

    @property
    def bound(self) -> float:
        """The largest possible speedup: the training time divided by the time that remains if `share` is saved."""
        return 1 / (1 - self.share)

    @property
    def text(self) -> str:
        """The recommendation as a string, including its bound."""
        bound = math.ceil(self.bound * 100) / 100  # rounded up, to remain an upper bound
        return (
            f"{self.share:.0%} of the training time {self.problem}. Eliminating this time would speed up training by "
            f"a factor of at most {bound:.2f}. {self.measured or self.remedy}"
        )


def has_enough_steps(record: RunRecord) -> bool:
    """Return whether the run has enough steps for recommendations."""
    return record.phases.steps >= _MIN_STEPS and training_seconds(record) > 0


def training_seconds(record: RunRecord) -> float:
    """Return the time in seconds for training, validation and checkpoints, excluding the first step."""
    return sum(
        seconds for phase, seconds in record.phases.seconds.items() if phase not in NON_TRAINING_PHASES
    )


def waits_for_data(record: RunRecord) -> bool:
    """Return whether the run spent a significant part of its training time waiting for data."""
    waiting = record.phases.seconds.get("data", 0.0)
    return has_enough_steps(record) and waiting >= _MIN_WAIT_SHARE * training_seconds(record)


def mean_speed(record: RunRecord) -> float | None:
    """Return the mean training speed in images/s, or None if it is unknown.

    The first step, validation and checkpoints are excluded.
    """
    excluded = ("validation", "checkpoint", *NON_TRAINING_PHASES)
    seconds = sum(value for phase, value in record.phases.seconds.items() if phase not in excluded)
    return record.phases.samples / seconds if record.phases.samples and seconds > 0 else None


def advice(record: RunRecord) -> list[Advice]:
    """Return the recommendations for a run, in descending order of their shares.

    If a phase takes a fraction `p` of the host's time, a recommendation for it cannot save more than `p`, even on an
    accelerator, because the host's phases add up to the duration of training. There are no recommendations for the
    forward and backward passes, nor for the optimizer on an accelerator, because the host cannot measure how much of
    this time an option would save.
    """
    if not has_enough_steps(record):
        return []
    total = training_seconds(record)
    shares = {
        phase: seconds / total
        for phase, seconds in record.phases.seconds.items()
        if phase not in NON_TRAINING_PHASES
    }
    items = [*_input_advice(record, shares), *_phase_advice(record, shares)]
    return sorted((item for item in items if item.share < 1), key=lambda item: -item.share)


def _input_advice(record: RunRecord, shares: dict[str, float]) -> list[Advice]:
    items = []
    if (waiting := shares.get("data", 0.0)) >= _MIN_WAIT_SHARE:
        workers = record.settings.get("num_workers")
        setting = f"num_workers is {workers}. " if isinstance(workers, int) else ""
        items.append(
            Advice(
                waiting,
                "is spent waiting for data",
                f"{setting}Try more workers if there are free cores, the decode-once cache (slipstream data cache), or "
                "smaller files.",
                _worker_summary(record),
            )
        )
    if (copies := shares.get("preprocess", 0.0)) >= 0.05:
        on_device = record.settings.get("device") != "cpu"
        prefetch = on_device and not record.settings.get("prefetch")
        remedy = (
            "Try prefetch=2, which copies batches ahead of time."
            if prefetch
            else "Simplify the data preprocessor."
        )
        items.append(Advice(copies, "is spent in the data preprocessor", remedy))
    return items


def _worker_summary(record: RunRecord) -> str:
    """Return a summary of the measured loading rates, or an empty string if there are none.

    Training cannot be faster than the loader alone, or than the steps without waiting for data.
    """
    rates = {each.num_workers: each.samples_per_second for each in record.loading_rates}
    current, speed, samples = record.settings.get("num_workers"), mean_speed(record), record.phases.samples
    if current not in rates or speed is None:
        return ""
    compute_rate = samples / max(samples / speed - record.phases.seconds.get("data", 0.0), 1e-9)
    # Exclude num_workers=0, because loading in the training process does not overlap with the steps.
    attainable = {count: min(rate, compute_rate) for count, rate in rates.items() if count and rate}
    max_rate = max(attainable.values(), default=0.0)
    best = min((count for count, rate in attainable.items() if rate >= 0.95 * max_rate), default=current)
    rates_text = ", ".join(f"{count}: {rate:.4g}" for count, rate in rates.items())
    probe = (
        f"After the run, batches were loaded without training (samples/s by num_workers: {rates_text}); training "
        f"reached {speed:.4g}."
    )
    if best == current or attainable[best] < 1.02 * speed:
        return (
            f"{probe} No measured worker count is significantly faster than num_workers={current}. Try the decode-once "
            "cache (slipstream data cache), smaller files, or simpler transforms."
        )
    total = training_seconds(record)
    ratio = total / (total - samples / speed + samples / attainable[best])
    bound = math.ceil(ratio * 100) / 100
    return f"{probe} With num_workers={best}, training would speed up by a factor of at most {bound:.2f}."


def tuned_text(record: RunRecord) -> str:
    """Return a summary of the `slipstream tune` result for this configuration, or an empty string if there is none."""
    if not record.tuned:
        return ""
    tuned = record.tuned[0]
    interval = (
        "the product of the ratios measured for each option"
        if tuned.is_product
        else f"{tuned.low:.2f} to {tuned.high:.2f}"
    )
    return (
        f"slipstream tune has measured this configuration on this machine: with {' + '.join(tuned.adopted)}, training "
        f"steps {'probably ' * tuned.is_uncertain}run {tuned.ratio:.2f} times as fast as without these options "
        f"({interval}; validation is not included). Run slipstream tune again with the same arguments to write this "
        "result from its cache to a file (by default, tuned.yaml), and train with +speed=FILE."
    )


def _phase_advice(record: RunRecord, shares: dict[str, float]) -> list[Advice]:
    # On an accelerator, the host waits for the device when it reads losses, so this time is not the cost of logging.
    on_host = record.settings.get("device") == "cpu"
    background = (
        ", or in the background (async_save=True)" if record.settings.get("async_save") is False else ""
    )
    rules = [
        ("validation", 0.2, True, "is spent in validation", "Validate less often (train_cfg.val_interval)."),
        ("checkpoint", 0.03, True, "is spent saving checkpoints",
         f"Save less often (default_hooks.checkpoint.interval){background}."),
        ("logging", 0.03, on_host, "is spent reading losses and writing log lines",
         "Log less often (default_hooks.logger.interval)."),
        ("hooks", 0.05, True, "is spent in hooks", "Check the custom hooks, for example with ProfilerHook."),
        ("optimizer", 0.15, on_host and record.settings.get("fused") is False, "is spent in the optimizer",
         "Try fused=True, which computes the update in fewer kernels."),
    ]  # fmt: skip
    return [
        Advice(shares[phase], problem, remedy)
        for phase, min_share, applies, problem, remedy in rules
        if applies and shares.get(phase, 0.0) >= min_share
    ]
