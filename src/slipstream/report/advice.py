"""Recommendations based on the measured time breakdown, each with an upper bound on its gain."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.report.record import RunRecord

__all__ = [
    "OUTSIDE",
    "Advice",
    "advice",
    "mean_speed",
    "training_seconds",
    "trusted_split",
    "tuned_text",
    "waits",
]

OUTSIDE = ("other", "test")
"""The phases of a run that are not part of training."""

_WAITS = 0.05
"""Minimum fraction of time spent waiting for data that leads to a recommendation."""
_FEWEST_STEPS = 10
"""Recommendations require more steps than this; the time breakdown of a short run poorly predicts longer runs."""


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


def trusted_split(record: RunRecord) -> bool:
    """Return whether the run has enough steps for recommendations."""
    return record.phases.steps > _FEWEST_STEPS and training_seconds(record) > 0


def training_seconds(record: RunRecord) -> float:
    """Return the duration of training, validation and checkpoints, excluding the first step."""
    return sum(seconds for phase, seconds in record.phases.seconds.items() if phase not in OUTSIDE)


def waits(record: RunRecord) -> bool:
    """Return whether the run has spent a significant part of its time waiting for data."""
    return trusted_split(record) and record.phases.seconds.get("data", 0.0) >= _WAITS * training_seconds(
        record
    )


def mean_speed(record: RunRecord) -> float | None:
    """Return the mean training speed in images/s, excluding the first step, validation and checkpoints, or None."""
    outside = ("validation", "checkpoint", *OUTSIDE)
    seconds = sum(value for phase, value in record.phases.seconds.items() if phase not in outside)
    return record.phases.samples / seconds if record.phases.samples and seconds > 0 else None


def advice(record: RunRecord) -> list[Advice]:
    """Return the recommendations for a run, in descending order of their shares.

    If a phase takes a fraction `p` of the host's time, a recommendation for it cannot save more than `p`, even on an
    accelerator, because the host's phases add up to the duration of training. There are no recommendations for the
    forward and backward passes, nor for the optimizer on an accelerator, because the host cannot measure how much of
    this time an option would save.
    """
    if not trusted_split(record):
        return []
    total = training_seconds(record)
    share = {
        phase: seconds / total for phase, seconds in record.phases.seconds.items() if phase not in OUTSIDE
    }
    found = [*_of_data(record, share), *_of_others(record, share)]
    return sorted((item for item in found if item.share < 1), key=lambda item: -item.share)


def _of_data(record: RunRecord, share: dict[str, float]) -> list[Advice]:
    found = []
    if (waiting := share.get("data", 0.0)) >= _WAITS:
        workers = record.settings.get("num_workers")
        more = f"num_workers is {workers}. " if isinstance(workers, int) else ""
        found.append(
            Advice(
                waiting,
                "is spent waiting for data",
                f"{more}Try more workers if there are free cores, the decode-once cache (slipstream data cache), or "
                "smaller files.",
                _measured_workers(record),
            )
        )
    if (copies := share.get("preprocess", 0.0)) >= 0.05:
        on_device = record.settings.get("device") != "cpu"
        prefetch = on_device and not record.settings.get("prefetch")
        remedy = (
            "Try prefetch=2, which copies batches ahead of time."
            if prefetch
            else "Simplify the data preprocessor."
        )
        found.append(Advice(copies, "is spent in the data preprocessor", remedy))
    return found


def _measured_workers(record: RunRecord) -> str:
    """Return a summary of the measured loading rates, or an empty string if there are none.

    Training cannot be faster than the loader alone, or than the steps without waiting for data.
    """
    rates = {each.num_workers: each.samples_per_second for each in record.loading_rates}
    present, speed, samples = record.settings.get("num_workers"), mean_speed(record), record.phases.samples
    if present not in rates or speed is None:
        return ""
    computing = samples / max(samples / speed - record.phases.seconds.get("data", 0.0), 1e-9)
    # Loading in the training process does not overlap with the steps.
    possible = {count: min(rate, computing) for count, rate in rates.items() if count and rate}
    most = max(possible.values(), default=0.0)
    best = min((count for count, rate in possible.items() if rate >= 0.95 * most), default=present)
    listed = ", ".join(f"{count}: {rate:.4g}" for count, rate in rates.items())
    probe = (
        f"After the run, batches were loaded without training (samples/s by num_workers: {listed}); training "
        f"reached {speed:.4g}."
    )
    if best == present or possible[best] < 1.02 * speed:
        return (
            f"{probe} No measured worker count is faster than num_workers={present}. Try the decode-once "
            "cache (slipstream data cache), smaller files, or simpler transforms."
        )
    total = training_seconds(record)
    ratio = total / (total - samples / speed + samples / possible[best])
    bound = math.ceil(ratio * 100) / 100
    return f"{probe} With num_workers={best}, training would speed up by a factor of at most {bound:.2f}."


def tuned_text(record: RunRecord) -> str:
    """Return a summary of the `slipstream tune` result for this configuration, or an empty string if there is none."""
    if not record.tuned:
        return ""
    found = record.tuned[0]
    how = (
        "the product of the ratios of the individual options"
        if found.is_product
        else f"{found.low:.2f} to {found.high:.2f}"
    )
    return (
        f"slipstream tune has measured this configuration on this machine: with {' + '.join(found.adopted)}, training "
        f"steps run {found.ratio:.2f} times as fast as without ({how}; validation is not included). Run slipstream "
        "tune again to write this result from its cache to tuned.yaml, and train with +speed=tuned.yaml."
    )


def _of_others(record: RunRecord, share: dict[str, float]) -> list[Advice]:
    # On an accelerator, the host waits for the device when it reads losses, so this time is not the cost of logging.
    on_host = record.settings.get("device") == "cpu"
    background = (
        ", or in the background (async_save=True)" if record.settings.get("async_save") is False else ""
    )
    rules = [
        ("validation", 0.2, True, "is validation", "Validate less often (train_cfg.val_interval)."),
        ("checkpoint", 0.03, True, "is spent saving checkpoints",
         f"Save less often (default_hooks.checkpoint.interval){background}."),
        ("logging", 0.03, on_host, "is spent reading losses and writing log lines",
         "Log less often (default_hooks.logger.interval)."),
        ("hooks", 0.05, True, "is spent in hooks", "Check the custom hooks, for example with ProfilerHook."),
        ("optimizer", 0.15, on_host and record.settings.get("fused") is False, "is spent in the optimizer",
         "Try fused=True, which computes the update in fewer kernels."),
    ]  # fmt: skip
    return [
        Advice(share[phase], problem, remedy)
        for phase, least, applies, problem, remedy in rules
        if applies and share.get(phase, 0.0) >= least
    ]
